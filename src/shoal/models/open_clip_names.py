"""Map open_clip's model names, pairs of model and training data, to the Hub repositories that hold them.

The pairs in open_clip_names.tsv are those of open_clip's own list (github.com/mlfoundations/open_clip,
src/open_clip/pretrained.py), as far as they are repositories in its layout. Excludes audio models, single pickled
files, a pair whose weights have another size, and one whose repository holds the weights of another pair.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from shoal.models.address import Address

HUB = "hf-hub:"
"""open_clip's prefix for a Hub repository in place of a model name."""

_QUICK = "-quickgelu"
_QUICK_TAGS = frozenset(
    {"openai", "yfcc15m", "cc12m", "metaclip_400m", "metaclip_fullcc", "metaclip2_worldwide", "dfn2b", "dfn5b"}
)
_QUICK_MORE = {"ViT-B-32": frozenset({"laion400m_e31", "laion400m_e32"})}
"""Models trained with the other activation also have an architecture name of their own. The repositories state the
activation, whatever name is used to request them."""

_LINES = Path(__file__).with_suffix(".tsv").read_text(encoding="ascii").splitlines()
REPOSITORIES = {(name, tag): repository for name, tag, repository in (line.split("\t") for line in _LINES)}


def find_repository(name: str, pretrained: str) -> str | None:
    """Return the repository, org/name, of an open_clip model; None for an unknown pair.

    `name`: as in open_clip, or "hf-hub:org/name", which is a repository whatever `pretrained` says.
    """
    if name.startswith(HUB):
        return name.removeprefix(HUB) or None
    tag = pretrained.lower().replace("-", "_")
    plain = name.removesuffix(_QUICK)
    if plain != name and tag not in _QUICK_TAGS | _QUICK_MORE.get(plain, frozenset()):
        return None
    return REPOSITORIES.get((plain, tag))


def find_pair_repository(pair: str) -> str | None:
    """Return the repository of a pair by its served name, `name/pretrained`; None for any other name."""
    name, _, pretrained = pair.partition("/")
    return find_repository(name, pretrained)


def resolve_pair(address: Address) -> Address:
    """Return the repository of a pair, for an address that names one on the hub; any other address unchanged."""
    found = find_pair_repository(address.target) if address.scheme == "hf" else None
    return address if found is None else structs.replace(address, target=found)

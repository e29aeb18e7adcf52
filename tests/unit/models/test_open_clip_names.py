"""open_clip's names and the repositories that they refer to."""

from __future__ import annotations

import pytest

from shoal.backends import parse_address
from shoal.models.open_clip_names import REPOSITORIES, find_pair_repository, find_repository, resolve_pair
from shoal.names import is_name


@pytest.mark.parametrize(
    ("name", "pretrained", "found"),
    [
        ("ViT-B-32", "laion2b_s34b_b79k", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"),
        ("ViT-B-32", "laion2b-s34B-b79K", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"),
        ("ViT-B-32", "openai", "timm/vit_base_patch32_clip_224.openai"),
        ("ViT-B-32-quickgelu", "openai", "timm/vit_base_patch32_clip_224.openai"),
        ("ViT-B-32-quickgelu", "laion400m_e32", "timm/vit_base_patch32_clip_224.laion400m_e32"),
        ("ViT-B-32-quickgelu", "laion2b_s34b_b79k", None),
        ("ViT-B-16-quickgelu", "laion400m_e32", None),
        ("ViT-L-14", "datacomp_xl_s13b_b90k", "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K"),
        ("ViT-H-14-378-quickgelu", "dfn5b", "apple/DFN5B-CLIP-ViT-H-14-378"),
        ("ViT-bigG-14", "laion2b_s39b_b160k", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"),
        ("ViT-B-16-SigLIP", "webli", "timm/ViT-B-16-SigLIP"),
        ("ViT-B-32", "none", None),
        ("vit-b-32", "openai", None),
        ("hf-hub:org/name", "", "org/name"),
        ("hf-hub:org/name", "whatever", "org/name"),
        ("hf-hub:", "", None),
        ("", "", None),
    ],
)
def test_pairs(name: str, pretrained: str, found: str | None) -> None:
    assert find_repository(name, pretrained) == found
    if not name.startswith("hf-hub:"):
        assert find_pair_repository(f"{name}/{pretrained}") == found


@pytest.mark.parametrize("name", ["ViT-B-32", "org/name", "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", ""])
def test_other_names_are_no_pairs(name: str) -> None:
    assert find_pair_repository(name) is None


def test_every_pair_can_be_served_and_every_repository_fetched() -> None:
    assert len(REPOSITORIES) > 150
    for (name, tag), found in REPOSITORIES.items():
        assert is_name(f"{name}/{tag}")
        assert tag == tag.lower().replace("-", "_")
        address = parse_address(found)
        assert (address.scheme, address.target) == ("hf", found)
        assert find_pair_repository(found) is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("ViT-B-32/openai", "hf:timm/vit_base_patch32_clip_224.openai"),
        ("hf:ViT-B-32/openai@v1", "hf:timm/vit_base_patch32_clip_224.openai@v1"),
        ("org/name", "hf:org/name"),
        ("file:ViT-B-32/openai", "file:ViT-B-32/openai"),
    ],
)
def test_the_address_of_the_repository_of_a_pair(address: str, expected: str) -> None:
    """For the hub only; a revision is the repository's."""
    assert str(resolve_pair(parse_address(address))) == expected

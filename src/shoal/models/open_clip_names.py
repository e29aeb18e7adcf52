"""Map open_clip's model names, pairs of model and training data, to the Hub repositories that hold them.

The pairs are those of open_clip's own list (github.com/mlfoundations/open_clip, src/open_clip/pretrained.py), as far as
they are repositories in its layout. Excludes audio models, single pickled files, a pair whose weights have another
size, and one whose repository holds the weights of another pair.
"""

from __future__ import annotations

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

_REPOSITORIES: dict[str, dict[str, str]] = {
    "RN50": {
        "openai": "timm/resnet50_clip.openai",
        "yfcc15m": "timm/resnet50_clip.yfcc15m",
        "cc12m": "timm/resnet50_clip.cc12m",
    },
    "RN101": {
        "openai": "timm/resnet101_clip.openai",
        "yfcc15m": "timm/resnet101_clip.yfcc15m",
    },
    "RN50x4": {"openai": "timm/resnet50x4_clip.openai"},
    "RN50x16": {"openai": "timm/resnet50x16_clip.openai"},
    "RN50x64": {"openai": "timm/resnet50x64_clip.openai"},
    "ViT-B-32": {
        "openai": "timm/vit_base_patch32_clip_224.openai",
        "laion400m_e31": "timm/vit_base_patch32_clip_224.laion400m_e31",
        "laion400m_e32": "timm/vit_base_patch32_clip_224.laion400m_e32",
        "laion2b_e16": "timm/vit_base_patch32_clip_224.laion2b_e16",
        "laion2b_s34b_b79k": "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
        "datacomp_xl_s13b_b90k": "laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K",
        "datacomp_m_s128m_b4k": "laion/CLIP-ViT-B-32-DataComp.M-s128M-b4K",
        "commonpool_m_clip_s128m_b4k": "laion/CLIP-ViT-B-32-CommonPool.M.clip-s128M-b4K",
        "commonpool_m_laion_s128m_b4k": "laion/CLIP-ViT-B-32-CommonPool.M.laion-s128M-b4K",
        "commonpool_m_image_s128m_b4k": "laion/CLIP-ViT-B-32-CommonPool.M.image-s128M-b4K",
        "commonpool_m_text_s128m_b4k": "laion/CLIP-ViT-B-32-CommonPool.M.text-s128M-b4K",
        "commonpool_m_basic_s128m_b4k": "laion/CLIP-ViT-B-32-CommonPool.M.basic-s128M-b4K",
        "commonpool_m_s128m_b4k": "laion/CLIP-ViT-B-32-CommonPool.M-s128M-b4K",
        "datacomp_s_s13m_b4k": "laion/CLIP-ViT-B-32-DataComp.S-s13M-b4K",
        "commonpool_s_clip_s13m_b4k": "laion/CLIP-ViT-B-32-CommonPool.S.clip-s13M-b4K",
        "commonpool_s_laion_s13m_b4k": "laion/CLIP-ViT-B-32-CommonPool.S.laion-s13M-b4K",
        "commonpool_s_image_s13m_b4k": "laion/CLIP-ViT-B-32-CommonPool.S.image-s13M-b4K",
        "commonpool_s_text_s13m_b4k": "laion/CLIP-ViT-B-32-CommonPool.S.text-s13M-b4K",
        "commonpool_s_basic_s13m_b4k": "laion/CLIP-ViT-B-32-CommonPool.S.basic-s13M-b4K",
        "commonpool_s_s13m_b4k": "laion/CLIP-ViT-B-32-CommonPool.S-s13M-b4K",
        "metaclip_400m": "timm/vit_base_patch32_clip_224.metaclip_400m",
        "metaclip_fullcc": "timm/vit_base_patch32_clip_224.metaclip_2pt5b",
    },
    "ViT-B-32-256": {"datacomp_s34b_b86k": "laion/CLIP-ViT-B-32-256x256-DataComp-s34B-b86K"},
    "ViT-B-16": {
        "openai": "timm/vit_base_patch16_clip_224.openai",
        "laion400m_e31": "timm/vit_base_patch16_clip_224.laion400m_e31",
        "laion400m_e32": "timm/vit_base_patch16_clip_224.laion400m_e32",
        "laion2b_s34b_b88k": "laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
        "datacomp_xl_s13b_b90k": "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K",
        "datacomp_l_s1b_b8k": "laion/CLIP-ViT-B-16-DataComp.L-s1B-b8K",
        "commonpool_l_clip_s1b_b8k": "laion/CLIP-ViT-B-16-CommonPool.L.clip-s1B-b8K",
        "commonpool_l_laion_s1b_b8k": "laion/CLIP-ViT-B-16-CommonPool.L.laion-s1B-b8K",
        "commonpool_l_image_s1b_b8k": "laion/CLIP-ViT-B-16-CommonPool.L.image-s1B-b8K",
        "commonpool_l_text_s1b_b8k": "laion/CLIP-ViT-B-16-CommonPool.L.text-s1B-b8K",
        "commonpool_l_basic_s1b_b8k": "laion/CLIP-ViT-B-16-CommonPool.L.basic-s1B-b8K",
        "commonpool_l_s1b_b8k": "laion/CLIP-ViT-B-16-CommonPool.L-s1B-b8K",
        "dfn2b": "apple/DFN2B-CLIP-ViT-B-16",
        "metaclip_400m": "timm/vit_base_patch16_clip_224.metaclip_400m",
        "metaclip_fullcc": "timm/vit_base_patch16_clip_224.metaclip_2pt5b",
    },
    "ViT-B-16-plus-240": {"laion400m_e31": "timm/vit_base_patch16_plus_clip_240.laion400m_e31"},
    "ViT-L-14": {
        "openai": "timm/vit_large_patch14_clip_224.openai",
        "laion400m_e31": "timm/vit_large_patch14_clip_224.laion400m_e31",
        "laion400m_e32": "timm/vit_large_patch14_clip_224.laion400m_e32",
        "laion2b_s32b_b82k": "laion/CLIP-ViT-L-14-laion2B-s32B-b82K",
        "datacomp_xl_s13b_b90k": "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K",
        "commonpool_xl_clip_s13b_b90k": "laion/CLIP-ViT-L-14-CommonPool.XL.clip-s13B-b90K",
        "commonpool_xl_laion_s13b_b90k": "laion/CLIP-ViT-L-14-CommonPool.XL.laion-s13B-b90K",
        "commonpool_xl_s13b_b90k": "laion/CLIP-ViT-L-14-CommonPool.XL-s13B-b90K",
        "metaclip_400m": "timm/vit_large_patch14_clip_224.metaclip_400m",
        "metaclip_fullcc": "timm/vit_large_patch14_clip_224.metaclip_2pt5b",
        "dfn2b": "apple/DFN2B-CLIP-ViT-L-14",
        "dfn2b_s39b": "apple/DFN2B-CLIP-ViT-L-14-39B",
    },
    "ViT-L-14-336": {"openai": "timm/vit_large_patch14_clip_336.openai"},
    "ViT-H-14": {
        "laion2b_s32b_b79k": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        "metaclip_fullcc": "timm/vit_huge_patch14_clip_224.metaclip_2pt5b",
        "metaclip_altogether": "timm/vit_huge_patch14_clip_224.metaclip_altogether",
        "dfn5b": "apple/DFN5B-CLIP-ViT-H-14",
    },
    "ViT-H-14-378": {"dfn5b": "apple/DFN5B-CLIP-ViT-H-14-378"},
    "ViT-g-14": {
        "laion2b_s12b_b42k": "laion/CLIP-ViT-g-14-laion2B-s12B-b42K",
        "laion2b_s34b_b88k": "laion/CLIP-ViT-g-14-laion2B-s34B-b88K",
    },
    "ViT-bigG-14": {
        "laion2b_s39b_b160k": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
        "metaclip_fullcc": "timm/vit_gigantic_patch14_clip_224.metaclip_2pt5b",
    },
    "roberta-ViT-B-32": {"laion2b_s12b_b32k": "laion/CLIP-ViT-B-32-roberta-base-laion2B-s12B-b32k"},
    "xlm-roberta-base-ViT-B-32": {"laion5b_s13b_b90k": "laion/CLIP-ViT-B-32-xlm-roberta-base-laion5B-s13B-b90k"},
    "xlm-roberta-large-ViT-H-14": {
        "frozen_laion5b_s13b_b90k": "laion/CLIP-ViT-H-14-frozen-xlm-roberta-large-laion5B-s13B-b90k"
    },
    "convnext_base": {"laion400m_s13b_b51k": "laion/CLIP-convnext_base-laion400M-s13B-b51K"},
    "convnext_base_w": {
        "laion2b_s13b_b82k": "laion/CLIP-convnext_base_w-laion2B-s13B-b82K",
        "laion2b_s13b_b82k_augreg": "laion/CLIP-convnext_base_w-laion2B-s13B-b82K-augreg",
        "laion_aesthetic_s13b_b82k": "laion/CLIP-convnext_base_w-laion_aesthetic-s13B-b82K",
    },
    "convnext_base_w_320": {
        "laion_aesthetic_s13b_b82k": "laion/CLIP-convnext_base_w_320-laion_aesthetic-s13B-b82K",
        "laion_aesthetic_s13b_b82k_augreg": "laion/CLIP-convnext_base_w_320-laion_aesthetic-s13B-b82K-augreg",
    },
    "convnext_large_d": {"laion2b_s26b_b102k_augreg": "laion/CLIP-convnext_large_d.laion2B-s26B-b102K-augreg"},
    "convnext_large_d_320": {
        "laion2b_s29b_b131k_ft": "laion/CLIP-convnext_large_d_320.laion2B-s29B-b131K-ft",
        "laion2b_s29b_b131k_ft_soup": "laion/CLIP-convnext_large_d_320.laion2B-s29B-b131K-ft-soup",
    },
    "convnext_xxlarge": {
        "laion2b_s34b_b82k_augreg": "laion/CLIP-convnext_xxlarge-laion2B-s34B-b82K-augreg",
        "laion2b_s34b_b82k_augreg_rewind": "laion/CLIP-convnext_xxlarge-laion2B-s34B-b82K-augreg-rewind",
        "laion2b_s34b_b82k_augreg_soup": "laion/CLIP-convnext_xxlarge-laion2B-s34B-b82K-augreg-soup",
    },
    "coca_ViT-B-32": {
        "laion2b_s13b_b90k": "laion/CoCa-ViT-B-32-laion2B-s13B-b90k",
        "mscoco_finetuned_laion2b_s13b_b90k": "laion/mscoco_finetuned_CoCa-ViT-B-32-laion2B-s13B-b90k",
    },
    "coca_ViT-L-14": {
        "laion2b_s13b_b90k": "laion/CoCa-ViT-L-14-laion2B-s13B-b90k",
        "mscoco_finetuned_laion2b_s13b_b90k": "laion/mscoco_finetuned_CoCa-ViT-L-14-laion2B-s13B-b90k",
    },
    "EVA01-g-14": {"laion400m_s11b_b41k": "timm/eva_giant_patch14_clip_224.laion400m_s11b_b41k"},
    "EVA01-g-14-plus": {"merged2b_s11b_b114k": "timm/eva_giant_patch14_plus_clip_224.merged2b_s11b_b114k"},
    "EVA02-B-16": {"merged2b_s8b_b131k": "timm/eva02_base_patch16_clip_224.merged2b_s8b_b131k"},
    "EVA02-L-14": {"merged2b_s4b_b131k": "timm/eva02_large_patch14_clip_224.merged2b_s4b_b131k"},
    "EVA02-L-14-336": {"merged2b_s6b_b61k": "timm/eva02_large_patch14_clip_336.merged2b_s6b_b61k"},
    "EVA02-E-14": {"laion2b_s4b_b115k": "timm/eva02_enormous_patch14_clip_224.laion2b_s4b_b115k"},
    "EVA02-E-14-plus": {"laion2b_s9b_b144k": "timm/eva02_enormous_patch14_plus_clip_224.laion2b_s9b_b144k"},
    "ViT-B-16-SigLIP": {"webli": "timm/ViT-B-16-SigLIP"},
    "ViT-B-16-SigLIP-256": {"webli": "timm/ViT-B-16-SigLIP-256"},
    "ViT-B-16-SigLIP-i18n-256": {"webli": "timm/ViT-B-16-SigLIP-i18n-256"},
    "ViT-B-16-SigLIP-384": {"webli": "timm/ViT-B-16-SigLIP-384"},
    "ViT-B-16-SigLIP-512": {"webli": "timm/ViT-B-16-SigLIP-512"},
    "ViT-L-16-SigLIP-256": {"webli": "timm/ViT-L-16-SigLIP-256"},
    "ViT-L-16-SigLIP-384": {"webli": "timm/ViT-L-16-SigLIP-384"},
    "ViT-SO400M-14-SigLIP": {"webli": "timm/ViT-SO400M-14-SigLIP"},
    "ViT-SO400M-16-SigLIP-i18n-256": {"webli": "timm/ViT-SO400M-16-SigLIP-i18n-256"},
    "ViT-SO400M-14-SigLIP-384": {"webli": "timm/ViT-SO400M-14-SigLIP-384"},
    "ViT-B-32-SigLIP2-256": {"webli": "timm/ViT-B-32-SigLIP2-256"},
    "ViT-B-16-SigLIP2": {"webli": "timm/ViT-B-16-SigLIP2"},
    "ViT-B-16-SigLIP2-256": {"webli": "timm/ViT-B-16-SigLIP2-256"},
    "ViT-B-16-SigLIP2-384": {"webli": "timm/ViT-B-16-SigLIP2-384"},
    "ViT-B-16-SigLIP2-512": {"webli": "timm/ViT-B-16-SigLIP2-512"},
    "ViT-B-16-SigLIP2-naflex": {"webli": "timm/ViT-B-16-SigLIP2-naflex"},
    "ViT-L-16-SigLIP2-256": {"webli": "timm/ViT-L-16-SigLIP2-256"},
    "ViT-L-16-SigLIP2-384": {"webli": "timm/ViT-L-16-SigLIP2-384"},
    "ViT-L-16-SigLIP2-512": {"webli": "timm/ViT-L-16-SigLIP2-512"},
    "ViT-SO400M-14-SigLIP2": {"webli": "timm/ViT-SO400M-14-SigLIP2"},
    "ViT-SO400M-14-SigLIP2-378": {"webli": "timm/ViT-SO400M-14-SigLIP2-378"},
    "ViT-SO400M-16-SigLIP2-256": {"webli": "timm/ViT-SO400M-16-SigLIP2-256"},
    "ViT-SO400M-16-SigLIP2-384": {"webli": "timm/ViT-SO400M-16-SigLIP2-384"},
    "ViT-SO400M-16-SigLIP2-512": {"webli": "timm/ViT-SO400M-16-SigLIP2-512"},
    "ViT-SO400M-16-SigLIP2-naflex": {"webli": "timm/ViT-SO400M-16-SigLIP2-naflex"},
    "ViT-gopt-16-SigLIP2-256": {"webli": "timm/ViT-gopt-16-SigLIP2-256"},
    "ViT-gopt-16-SigLIP2-384": {"webli": "timm/ViT-gopt-16-SigLIP2-384"},
    "ViT-L-14-CLIPA": {"datacomp1b": "UCSC-VLAA/ViT-L-14-CLIPA-datacomp1B"},
    "ViT-L-14-CLIPA-336": {"datacomp1b": "UCSC-VLAA/ViT-L-14-CLIPA-336-datacomp1B"},
    "ViT-H-14-CLIPA": {"datacomp1b": "UCSC-VLAA/ViT-H-14-CLIPA-datacomp1B"},
    "ViT-H-14-CLIPA-336": {
        "laion2b": "UCSC-VLAA/ViT-H-14-CLIPA-336-laion2B",
        "datacomp1b": "UCSC-VLAA/ViT-H-14-CLIPA-336-datacomp1B",
    },
    "ViT-bigG-14-CLIPA": {"datacomp1b": "UCSC-VLAA/ViT-bigG-14-CLIPA-datacomp1B"},
    "ViT-bigG-14-CLIPA-336": {"datacomp1b": "UCSC-VLAA/ViT-bigG-14-CLIPA-336-datacomp1B"},
    "nllb-clip-base": {"v1": "visheratin/nllb-clip-base-oc"},
    "nllb-clip-large": {"v1": "visheratin/nllb-clip-large-oc"},
    "nllb-clip-base-siglip": {
        "v1": "visheratin/nllb-clip-base-siglip",
        "mrl": "visheratin/nllb-siglip-mrl-base",
    },
    "nllb-clip-large-siglip": {
        "v1": "visheratin/nllb-clip-large-siglip",
        "mrl": "visheratin/nllb-siglip-mrl-large",
    },
    "MobileCLIP-S1": {"datacompdr": "apple/MobileCLIP-S1-OpenCLIP"},
    "MobileCLIP-S2": {"datacompdr": "apple/MobileCLIP-S2-OpenCLIP"},
    "MobileCLIP-B": {
        "datacompdr": "apple/MobileCLIP-B-OpenCLIP",
        "datacompdr_lt": "apple/MobileCLIP-B-LT-OpenCLIP",
    },
    "MobileCLIP2-B": {"dfndr2b": "timm/MobileCLIP2-B-OpenCLIP"},
    "MobileCLIP2-S0": {"dfndr2b": "timm/MobileCLIP2-S0-OpenCLIP"},
    "MobileCLIP2-S2": {"dfndr2b": "timm/MobileCLIP2-S2-OpenCLIP"},
    "MobileCLIP2-S3": {"dfndr2b": "timm/MobileCLIP2-S3-OpenCLIP"},
    "MobileCLIP2-S4": {"dfndr2b": "timm/MobileCLIP2-S4-OpenCLIP"},
    "MobileCLIP2-L-14": {"dfndr2b": "timm/MobileCLIP2-L-14-OpenCLIP"},
    "PE-Core-T-16-384": {"meta": "timm/PE-Core-T-16-384"},
    "PE-Core-S-16-384": {"meta": "timm/PE-Core-S-16-384"},
    "PE-Core-B-16": {"meta": "timm/PE-Core-B-16"},
    "PE-Core-L-14-336": {"meta": "timm/PE-Core-L-14-336"},
    "PE-Core-bigG-14-448": {"meta": "timm/PE-Core-bigG-14-448"},
    "ViT-H-14-worldwide": {"metaclip2_worldwide": "timm/vit_huge_patch14_clip_224.metaclip2_worldwide"},
    "ViT-H-14-worldwide-378": {"metaclip2_worldwide": "timm/vit_huge_patch14_clip_378.metaclip2_worldwide"},
    "ViT-bigG-14-worldwide": {"metaclip2_worldwide": "timm/vit_gigantic_patch14_clip_224.metaclip2_worldwide"},
    "ViT-bigG-14-worldwide-378": {"metaclip2_worldwide": "timm/vit_gigantic_patch14_clip_378.metaclip2_worldwide"},
}


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
    return _REPOSITORIES.get(plain, {}).get(tag)


def find_pair_repository(pair: str) -> str | None:
    """Return the repository of a pair by its served name, `name/pretrained`; None for any other name."""
    name, _, pretrained = pair.partition("/")
    return find_repository(name, pretrained)


def resolve_pair(address: Address) -> Address:
    """Return the repository of a pair, for an address that names one on the hub; any other address unchanged."""
    found = find_pair_repository(address.target) if address.scheme == "hf" else None
    return address if found is None else structs.replace(address, target=found)

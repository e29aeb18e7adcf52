"""Read config.json of the families that Shoal builds; reject anything unknown that would change the vectors.

A family is one module: a function from config.json to the description of its encoder, and a row in the table here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal.models.convert.contract.architecture import Encoder
from shoal.models.convert.contract.families.albert import read_albert
from shoal.models.convert.contract.families.bert import KINDS, read_bert
from shoal.models.convert.contract.families.deberta import read_deberta
from shoal.models.convert.contract.families.decoders import KINDS as DECODERS
from shoal.models.convert.contract.families.decoders import read_decoder
from shoal.models.convert.contract.families.gte import read_gte
from shoal.models.convert.contract.families.jina import is_flash_xlm_r, is_jina_v2, read_flash_xlm_r, read_jina_v2
from shoal.models.convert.contract.families.modern_bert import read_modern_bert
from shoal.models.convert.contract.families.nomic import read_nomic
from shoal.models.convert.contract.families.t5 import MODEL_TYPES as T5
from shoal.models.convert.contract.families.t5 import read_t5
from shoal.models.convert.contract.json_file import JsonFile


class _Reader(NamedTuple):
    """`stems`: how the names of its architectures begin. `own_code`: its models come with code (`auto_map`) that is
    never run: what it computes is built here from the configuration."""

    read: Callable[[JsonFile], Encoder]
    stems: tuple[str, ...]
    own_code: bool = False


_BERT_STEMS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "DistilBert", "Electra", "HF_ColBERT")
_READERS: dict[str, _Reader] = {
    **{model_type: _Reader(read_bert, _BERT_STEMS) for model_type in KINDS},
    **{
        model_type: _Reader(read_decoder, ("Qwen2", "Qwen3", "Llama", "Mistral", "Gemma"), own_code=True)
        for model_type in DECODERS
    },
    **{model_type: _Reader(read_t5, ("T5", "MT5")) for model_type in T5},
    "albert": _Reader(read_albert, ("Albert",)),
    "jina_embeddings_v3": _Reader(read_flash_xlm_r, ("JinaEmbeddingsV3",)),
    "deberta-v2": _Reader(read_deberta, ("DebertaV2",)),
    "nomic_bert": _Reader(read_nomic, ("NomicBert",), own_code=True),
    "new": _Reader(read_gte, ("New",), own_code=True),
    "gte": _Reader(read_gte, ("Gte",), own_code=True),
    "modernbert": _Reader(read_modern_bert, ("ModernBert", "HF_ColBERT")),
}
"""By model_type."""

_OTHERS: dict[str, tuple[Callable[[JsonFile], bool], _Reader]] = {
    "bert": (is_jina_v2, _Reader(read_jina_v2, ("JinaBert",), own_code=True)),
    "xlm-roberta": (is_flash_xlm_r, _Reader(read_flash_xlm_r, ("XLMRoberta",), own_code=True)),
}
"""Families that use the model_type of another, and how to tell."""


_INSTEAD = {
    "NomicVisionModel": "is an image tower alone, which Shoal does not build; use nomic-ai/nomic-embed-text-v1.5 for "
    "texts, or google/siglip2-base-patch16-224 for texts and images",
    "JinaVLForRanking": "is a language model that sees, which Shoal does not build; use "
    "jinaai/jina-reranker-v2-base-multilingual for texts, or serve this model with vLLM and give Shoal the address",
    "JinaForRanking": "compares all documents of a request in one text, which Shoal does not build; use "
    "jinaai/jina-reranker-v2-base-multilingual, or Qwen/Qwen3-Reranker-0.6B",
}
"""Known architectures that are not built, with advice."""


def read_encoder(config: JsonFile) -> Encoder:
    """Read the encoder from config.json. Raises ModelFileError naming the key for an unknown one."""
    for architecture in config.texts("architectures"):
        if architecture in _INSTEAD:
            raise config.refuse("architectures", f"{architecture!r} {_INSTEAD[architecture]}")
    model_type = config.text("model_type")
    reader = _READERS.get(model_type)
    is_other, other = _OTHERS.get(model_type, (None, None))
    if is_other is not None and is_other(config):
        reader = other
    if reader is None:
        known = ", ".join(_READERS)
        raise config.refuse(
            "model_type",
            f"{model_type!r} is not supported: Shoal builds graphs for {known}; use a repository that ships "
            "onnx/model.onnx",
        )
    _refuse_what_changes_the_vectors(config, reader)
    return reader.read(config)


def _refuse_what_changes_the_vectors(config: JsonFile, reader: _Reader) -> None:
    if "auto_map" in config and not reader.own_code:
        raise config.refuse("auto_map", "the model contains custom code, which Shoal never runs")
    for architecture in config.texts("architectures"):
        if not architecture.startswith(reader.stems):
            raise config.refuse("architectures", f"{architecture!r} is not an architecture that Shoal builds")
    for key in ("is_decoder", "add_cross_attention"):
        if config.boolean(key, False):
            raise config.refuse(key, "must be false: Shoal builds encoders")
    if "quantization_config" in config:
        raise config.refuse("quantization_config", "quantized weights are not supported; use the unquantized model")

"""The models that people use most, how Shoal serves each, and a tiny checkpoint with what its files say.

`python -m tests.unit.models.popular_models` prints the table of docs/model-list.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.unit.models.checkpoints import HIDDEN, checkpoint, dense, write_json
from tests.unit.models.family_checkpoints import family_checkpoint

NATIVE = "natively"


class Embedder(NamedTuple):
    """`architecture`: as users know it. `base`: a kind of `checkpoints`, or a name in `family_checkpoints`. `config`:
    fields of its config.json that decide how it is read, sizes left out. `after`: modules after the pooling.
    `prompts`: those that its files have. `notes`: for users."""

    name: str
    architecture: str
    base: str
    pooling: str
    after: tuple[str, ...] = ("Normalize",)
    config: dict[str, Any] = {}
    prompts: tuple[str, ...] = ()
    notes: str = ""

    def write(self, folder: Path) -> Path:
        """Write the tiny checkpoint."""
        pooling = {"word_embedding_dimension": HIDDEN, f"pooling_mode_{_FLAGS[self.pooling]}": True}
        if self.base in ("bert", "mpnet", "distilbert", "xlm-roberta"):
            checkpoint(folder, self.base, pooling=pooling, after=self.after, config=self.config)
        else:
            family_checkpoint(folder, self.base, pooling=pooling, after=self.after, **self.config)
        for index, module in enumerate(self.after, 2):
            if module == "Dense":
                dense(folder, f"{index}_Dense", HIDDEN, HIDDEN, activation=self.config.get("_dense", "Identity"))
        if self.prompts:
            write_json(
                folder / "config_sentence_transformers.json", {"prompts": {name: f"{name}: " for name in self.prompts}}
            )
        return folder


_FLAGS = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "rope_scaling": None}
_SNOWFLAKE = "its prompt `query` belongs before queries"
_E5 = 'put "query: " or "passage: " before texts, as its card says: a `prompts` entry of the model'
_INSTRUCT = "an instruction belongs before queries"

_JINA_TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")

EMBEDDERS = (
    Embedder("sentence-transformers/all-MiniLM-L6-v2", "BERT", "bert", "mean"),
    Embedder("sentence-transformers/all-MiniLM-L12-v2", "BERT", "bert", "mean"),
    Embedder("sentence-transformers/all-mpnet-base-v2", "MPNet", "mpnet", "mean"),
    Embedder("sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", "BERT", "bert", "mean", ()),
    Embedder("sentence-transformers/paraphrase-multilingual-mpnet-base-v2", "XLM-R", "xlm-roberta", "mean", ()),
    Embedder("sentence-transformers/multi-qa-mpnet-base-dot-v1", "MPNet", "mpnet", "cls", ()),
    Embedder(
        "sentence-transformers/distiluse-base-multilingual-cased-v2", "DistilBERT", "distilbert", "mean", ("Dense",)
    ),
    Embedder("sentence-transformers/LaBSE", "BERT", "bert", "cls", ("Dense", "Normalize")),
    Embedder("sentence-transformers/sentence-t5-base", "T5 encoder", "t5", "mean", ("Dense", "Normalize")),
    Embedder("sentence-transformers/gtr-t5-base", "T5 encoder", "t5", "mean", ("Dense", "Normalize")),
    Embedder("BAAI/bge-small-en-v1.5", "BERT", "bert", "cls"),
    Embedder("BAAI/bge-base-en-v1.5", "BERT", "bert", "cls"),
    Embedder("BAAI/bge-large-en-v1.5", "BERT", "bert", "cls"),
    Embedder("intfloat/e5-base-v2", "BERT", "bert", "mean", notes=_E5),
    Embedder("intfloat/multilingual-e5-base", "XLM-R", "xlm-roberta", "mean", notes=_E5),
    Embedder("intfloat/multilingual-e5-large-instruct", "XLM-R", "xlm-roberta", "mean", notes=_INSTRUCT),
    Embedder(
        "intfloat/e5-mistral-7b-instruct",
        "Mistral",
        "mistral",
        "lasttoken",
        config={"architectures": ["MistralModel"], "sliding_window": 4096},
        notes=f"{_INSTRUCT}; 14 GB of weights",
    ),
    Embedder("thenlper/gte-base", "BERT", "bert", "mean"),
    Embedder(
        "Alibaba-NLP/gte-base-en-v1.5",
        "GTE",
        "gte-published",
        "cls",
        (),
        {"architectures": ["NewModel"]},
        notes="its own code is not run",
    ),
    Embedder(
        "Alibaba-NLP/gte-multilingual-base",
        "GTE",
        "gte-published",
        "cls",
        notes="dense vectors; its own code is not run",
    ),
    Embedder(
        "Alibaba-NLP/gte-modernbert-base", "ModernBERT", "modernbert", "cls", (), {"architectures": ["ModernBertModel"]}
    ),
    Embedder(
        "Alibaba-NLP/gte-Qwen2-1.5B-instruct",
        "Qwen2",
        "qwen2-bidirectional",
        "lasttoken",
        config={"architectures": ["Qwen2ForCausalLM"]},
        notes="its config.json must state `is_causal`; see [limitations](limitations.md#embeddings)",
    ),
    Embedder("nomic-ai/nomic-embed-text-v1.5", "Nomic", "nomic", "mean", (), notes="task prefixes as its card says"),
    Embedder("nomic-ai/nomic-embed-text-v2-moe", "Nomic, experts", "nomic-experts", "mean", prompts=("query",)),
    Embedder("nomic-ai/modernbert-embed-base", "ModernBERT", "modernbert", "mean", notes="task prefixes"),
    Embedder("mixedbread-ai/mxbai-embed-large-v1", "BERT", "bert", "cls", (), prompts=("query", "passage")),
    Embedder("Snowflake/snowflake-arctic-embed-m-v1.5", "BERT", "bert", "cls", prompts=("query",), notes=_SNOWFLAKE),
    Embedder(
        "Snowflake/snowflake-arctic-embed-l-v2.0", "XLM-R", "xlm-roberta", "cls", prompts=("query",), notes=_SNOWFLAKE
    ),
    Embedder(
        "Snowflake/snowflake-arctic-embed-m-v2.0",
        "GTE",
        "gte",
        "cls",
        config={"architectures": ["GteModel"], "auto_map": {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"}},
        prompts=("query",),
        notes=_SNOWFLAKE,
    ),
    Embedder("jinaai/jina-embeddings-v2-base-en", "Jina 2", "jina-v2", "mean", ()),
    Embedder("jinaai/jina-embeddings-v2-base-code", "Jina 2", "jina-v2-code", "mean", ()),
    Embedder(
        "jinaai/jina-embeddings-v3",
        "Jina 3",
        "jina-v3",
        "mean",
        config={"lora_adaptations": list(_JINA_TASKS)},
        prompts=_JINA_TASKS,
        notes="requests name one of its five tasks; see [models](models.md#tasks)",
    ),
    Embedder("Qwen/Qwen3-Embedding-0.6B", "Qwen3", "qwen3", "lasttoken", config=_QWEN3, prompts=("query", "document")),
    Embedder(
        "Qwen/Qwen3-Embedding-4B",
        "Qwen3",
        "qwen3",
        "lasttoken",
        config=_QWEN3,
        prompts=("query", "document"),
        notes="16 GB of memory in f32",
    ),
    Embedder(
        "google/embeddinggemma-300m",
        "Gemma 3",
        "embeddinggemma",
        "mean",
        ("Dense", "Dense", "Normalize"),
        {"architectures": ["Gemma3TextModel"]},
        prompts=("query", "document", "Retrieval-query"),
        notes="accept its license, and set a token",
    ),
)
"""Dense embedders of texts."""


class Other(NamedTuple):
    """A model of another kind, and the test that holds its row."""

    name: str
    architecture: str
    served: str
    test: str
    notes: str = ""


_CLASSIFIERS = "tests/unit/models/convert/graphs/test_classifier.py"
_SCORING = "tests/unit/models/convert/test_scoring.py"
_PUBLISHED = "tests/unit/models/test_rerankers.py"
_ANSWERS = "reranker; takes an `instruction`"
_ENCODERS = "tests/parity/test_encoder_rerankers.py"
_JINA_RERANKER = (
    "reranker; its own code is not run; long documents are cut, see [limitations](limitations.md#reranking)"
)
OTHERS = (
    Other("BAAI/bge-m3", "XLM-R", NATIVE, "tests/unit/models/convert/test_heads.py", "dense, sparse and multi vectors"),
    Other("naver/splade-v3", "BERT", NATIVE, "tests/unit/models/convert/test_heads.py", "sparse vectors"),
    Other("colbert-ir/colbertv2.0", "BERT", NATIVE, "tests/unit/models/convert/test_heads.py", "multi vectors"),
    Other("cross-encoder/ms-marco-MiniLM-L6-v2", "BERT", NATIVE, _CLASSIFIERS, "reranker"),
    Other("BAAI/bge-reranker-base", "XLM-R", NATIVE, _CLASSIFIERS, "reranker"),
    Other("BAAI/bge-reranker-v2-m3", "XLM-R", NATIVE, _CLASSIFIERS, "reranker"),
    Other("Alibaba-NLP/gte-reranker-modernbert-base", "ModernBERT", NATIVE, _SCORING, "reranker"),
    Other("Alibaba-NLP/gte-multilingual-reranker-base", "GTE", NATIVE, _ENCODERS, "reranker; its own code is not run"),
    Other("jinaai/jina-reranker-v2-base-multilingual", "XLM-R", NATIVE, _ENCODERS, _JINA_RERANKER),
    Other("mixedbread-ai/mxbai-rerank-base-v1", "DeBERTa", NATIVE, "tests/parity/test_scoring.py", "reranker"),
    Other("cross-encoder/nli-deberta-v3-base", "DeBERTa", NATIVE, "tests/parity/test_scoring.py", "classifier"),
    Other("Qwen/Qwen3-Reranker-0.6B", "Qwen3", NATIVE, _PUBLISHED, _ANSWERS),
    Other("mixedbread-ai/mxbai-rerank-base-v2", "Qwen2", NATIVE, _PUBLISHED, _ANSWERS),
    Other("BAAI/bge-reranker-v2-gemma", "Gemma", NATIVE, _PUBLISHED, _ANSWERS),
    Other("minishlab/potion-base-8M", "model2vec", NATIVE, "tests/unit/models/convert/test_heads.py"),
    Other("openai/clip-vit-base-patch32", "CLIP", NATIVE, "tests/unit/models/test_prepare_dual_encoder.py"),
    Other("google/siglip-base-patch16-224", "SigLIP", NATIVE, "tests/unit/models/test_prepare_dual_encoder.py"),
)


def rows() -> list[tuple[str, ...]]:
    """Return the table's rows: model, architecture, how it is served, notes."""
    embedders: list[tuple[str, ...]] = [(each.name, each.architecture, NATIVE, _describe(each)) for each in EMBEDDERS]
    return embedders + [(each.name, each.architecture, each.served, each.notes) for each in OTHERS]


def _describe(each: Embedder) -> str:
    pooling = {"mean": "mean", "cls": "first token", "lasttoken": "last token"}[each.pooling]
    return f"{pooling}; {each.notes}" if each.notes else pooling


def table() -> str:
    """Return the table in Markdown."""
    header = [("model", "architecture", "served", "notes"), ("---",) * 4]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [*header, *rows()])


WRITERS: dict[str, Callable[[Path], Path]] = {each.name: each.write for each in EMBEDDERS}

if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")

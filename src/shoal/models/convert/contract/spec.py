"""Convert a model's contract to the TextSpec that serves it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.models.convert.contract.types import AfterPooling, Contract, Dense, LayerNorm, Normalize, Truncate
from shoal.specs import LayerSpec, PartsSpec, TextSpec

SENTENCE = "sentence_embedding"
ADAPTERS = "adapter_ids"
"""The input of a graph with an adapter for each task, int64 [b, l]: the same number in all of a row, 0 for no adapter,
or 1 + the place of a task."""


def text_spec(contract: Contract, *, tokenizer: str, inputs: Sequence[str], pooled: str, tokens: str = "") -> TextSpec:
    """Build the TextSpec of a model. `tokenizer` is a file in the served model's folder. The graph takes `inputs` and
    returns `pooled`: the sentence embedding itself, its value before a final Normalize, or token vectors to pool.
    `tokens` names its token vectors, if any. A classifier's graph returns only the logits that its contract names;
    other heads are those of the contract."""
    adapters = contract.encoder.adapters if contract.encoder is not None and ADAPTERS in inputs else None
    return TextSpec(
        tokenizer=tokenizer,
        inputs=tuple(inputs),
        dimension=contract.dimension,
        max_tokens=contract.max_tokens,
        pad_id=contract.pad_id,
        vocab_size=contract.vocab_size,
        lower_case=contract.lower_case,
        include_prompt=contract.pooling.include_prompt,
        prompts=contract.prompts,
        default_prompt_name=contract.default_prompt_name,
        pooling="+".join(contract.pooling.modes),
        modules=tuple(map(_describe_layer, contract.modules)),
        similarity=contract.similarity,
        sentence_embedding=SENTENCE,
        pooled=pooled,
        ends_normalized=contract.ends_normalized,
        tokens=tokens,
        score=contract.classifier.spec if contract.classifier else None,
        sparse=contract.sparse,
        multi=contract.late.spec if contract.late else None,
        frame_tokens=contract.table is None,
        dropped=contract.table.dropped if contract.table else (),
        parts=None if contract.table else _parts(contract),
        embedding_tasks=adapters.tasks if adapters else (),
        default_embedding_task=adapters.task if adapters else None,
    )


def _parts(contract: Contract) -> PartsSpec:
    weights, splade = contract.token_weights, contract.splade
    answers = contract.classifier.answers if contract.classifier else None
    return PartsSpec(
        encoder=contract.encoder_path,
        after=tuple(map(_layer, contract.modules)),
        late=tuple(map(_layer, contract.late.layers)) if contract.late else (),
        token_weights=_layer(weights.layer) if weights else None,
        splade=(splade.strategy, splade.activation) if splade else ("max", "relu"),
        answers=answers.ids if answers else (),
    )


def _layer(module: AfterPooling) -> LayerSpec:
    if isinstance(module, Normalize):
        return LayerSpec(kind="normalize")
    if isinstance(module, Truncate):
        return LayerSpec(kind="truncate", dimension=module.dimension)
    if isinstance(module, LayerNorm):
        return LayerSpec(kind="layer_norm", path=module.path, dimension=module.dimension, stem="norm.")
    return LayerSpec(
        kind="dense",
        takes=module.in_features,
        dimension=module.out_features,
        path=module.path,
        file=module.file,
        stem=module.stem,
        activation=module.activation,
        bias=module.bias,
        residual=module.residual,
    )


def _describe_layer(module: AfterPooling) -> str:
    tag = str(module.__struct_config__.tag)
    if isinstance(module, Truncate):
        return f"{tag}:{module.dimension}"
    return f"{tag}:{module.activation}" if isinstance(module, Dense) else tag

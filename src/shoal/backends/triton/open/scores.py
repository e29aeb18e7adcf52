"""Rerankers and classifiers on Triton that Shoal did not write: labels, activation, and a pipeline for those that read
text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.backends.triton.schema import LOGITS, TOKEN_OUTPUTS, Embedder
from shoal.config.settings import ModelTable
from shoal.core.protocols import EngineFacts, Prepared
from shoal.errors import ConfigError, InvalidValue
from shoal.models.convert.contract.classifier import is_cross_encoder, read_classifier, read_cross_modules
from shoal.models.convert.contract.json_file import read_object
from shoal.pipelines.text.string_pairs import StringPairPipeline, StringPairSpec
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.pipelines.upstream_options import PAIR, TEXT
from shoal.specs import Activation, ScoreSpec
from shoal.types import Array, BatchTask, Embed, Rerank

_VECTORS = frozenset(TOKEN_OUTPUTS) - {"output"}
"""Names of outputs that never hold scores."""


def read_head(source: Path) -> ScoreSpec | None:
    """Return the scores that a model's own files define, None if it has none. Raises ModelFileError."""
    modules = read_cross_modules(source) if is_cross_encoder(source) else None
    prefix = f"{modules.encoder}/" if modules and modules.encoder else ""
    config = read_object(source, f"{prefix}config.json")
    found = read_classifier(source, config, None, prefix, modules) if config is not None else None
    return found.spec if found is not None else None


def gives_scores(embedder: Embedder, head: ScoreSpec | None) -> bool:
    """Return whether a model's first output holds scores; `head`: the scores that its tokenizer's files
    define."""
    port = embedder.outputs[0]
    if port.canonical == LOGITS:
        return True
    if head is None or embedder.level == "token" or port.name in _VECTORS:
        return False
    return embedder.dimension in (None, len(head.labels))


def score_spec(
    name: str, table: ModelTable, embedder: Embedder, head: ScoreSpec | None, count: int | None
) -> ScoreSpec:
    """Return labels and activation: from the table, else from the files, else implied by the output's name.

    `count`: scores per item, None while unknown. Raises ConfigError for contradictions and for missing information.
    """
    port = embedder.outputs[0]
    labels = table.labels or (head.labels if head is not None else ())
    if labels and count not in (None, len(labels)):
        where = "`labels` of its table" if table.labels else "the config.json beside its tokenizer"
        raise ConfigError(
            f"{name} returns {count} scores per input, but {where} has {len(labels)} labels: correct `labels` in "
            f'[models."{name}"] of shoal.toml',
            param="labels",
        )
    labels = labels or tuple(f"LABEL_{index}" for index in range(count or 1))
    return ScoreSpec(
        labels=labels,
        activation=_activation(name, table, head, port.name, len(labels)),
        output=port.canonical,
        pairs=embedder.style == "pairs" or "rerank" in table.tasks or (head.pairs if head else len(labels) == 1),
    )


def _activation(name: str, table: ModelTable, head: ScoreSpec | None, output: str, labels: int) -> Activation:
    if table.activation is not None:
        return table.activation
    if head is not None:
        return head.activation
    if output == LOGITS:
        return "sigmoid" if labels == 1 else "softmax"
    raise ConfigError(
        f"{name} returns scores as {output!r}, and it is not known whether they are final: set `activation` in "
        f'[models."{name}"] of shoal.toml, to "identity" if they are, else to the function to apply ("sigmoid", '
        '"softmax")',
        param="activation",
    )


class TextScorePipeline(StringPairPipeline):
    """Pipeline for a model on Triton that reads one text, or always two (`pair`), and scores what it reads.

    The activation "identity" has no raw scores: the model's are final. `final` False returns them anyway, for a probe.
    """

    def __init__(
        self,
        score: ScoreSpec,
        *,
        pair: bool,
        truncate: bool,
        final: bool = True,
        max_tokens: int = 0,
        tokenizer: TextTokenizer | None = None,
    ) -> None:
        spec = StringPairSpec(
            labels=score.labels,
            activation=score.activation,
            max_tokens=max_tokens,
            output=score.output,
            raw=score.activation != "identity" or not final,
        )
        super().__init__(spec, truncate=truncate, tokenizer=tokenizer)
        self.score = score
        self.pair = pair

    def check(self, task: BatchTask) -> None:
        """Check as StringPairPipeline does; raise InvalidValue also for pairs where one text is read, and vice
        versa."""
        super().check(task)
        assert not isinstance(task, Embed)
        pairs = {True} if isinstance(task, Rerank) else {isinstance(item, tuple) for item in task.inputs}
        if pairs - {self.pair}:
            reads = "two texts together: send pairs" if self.pair else "one text at a time: do not send pairs"
            raise InvalidValue(f"the model reads {reads}", param="input")

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        tensors = super().collate(batch, facts)
        return {name: tensors[name] for name in ((TEXT, PAIR) if self.pair else (TEXT,))}

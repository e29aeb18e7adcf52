"""Convert query-document pairs and single texts to the tensors of a cross-encoder or classifier, and its logits to
scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from shoal.core.protocols import EngineFacts, Prepared, Tensors
from shoal.errors import EmptyInput, InvalidValue, ModelFileError, ShoalError
from shoal.pipelines.scores import score_rows
from shoal.pipelines.text.apart import ApartTokenizer
from shoal.pipelines.text.base import BasePipeline, Entry, TextInput
from shoal.pipelines.text.padding import ADAPTERS, IDS, INPUTS, TYPES, check_inputs, pad_batch
from shoal.pipelines.text.pairing import FramedText, PairInput, PairTokenizer
from shoal.pipelines.text.templating import TemplateTokenizer, reads_prompt
from shoal.pipelines.text.tokenizer import CHARS_PER_TOKEN, TextTokenizer, identify_tokenizer, too_long_error
from shoal.specs import TextSpec
from shoal.types import Array, BatchTask, Direction, Embed, Rerank

MAX_INSTRUCTION_CHARS = 2000
"""An instruction is a sentence or a few. It is tokenized on the event loop, when its request is checked."""

KEPT_INSTRUCTIONS = 64
"""Instructions whose tokenizers are kept."""

_Tokenizer: TypeAlias = PairTokenizer | TemplateTokenizer | ApartTokenizer


class _ItemOptions(NamedTuple):
    """A task's options for each of its items. `pairs` tokenizes them; `max_document_tokens`: tokens that a second text
    is cut to first."""

    pairs: _Tokenizer
    prompt: str
    raw: bool
    truncate: bool
    direction: Direction
    max_document_tokens: int | None


class PairPipeline(BasePipeline[_ItemOptions, FramedText]):
    """Pipeline for one model with `spec.score`: a row is its scores, float32 [labels].

    Pairs are framed and cut as transformers' fast tokenizers do with truncation "longest_first", or made one text by
    the model's template; single texts like any text. The model's default prompt, if any, precedes a single text or the
    first of a pair, or is the template's system message, as in sentence-transformers 6; there a task's instruction
    takes its place. The activation is applied to the logits here, so items with and without it share a call. `param` of
    an error names the field at fault, "input" for an item. Raises ModelFileError if the tokenizer or the spec cannot be
    used.
    """

    packed_type = FramedText

    def __init__(self, folder: Path, spec: TextSpec, *, truncate: bool) -> None:
        if spec.score is None:
            raise ModelFileError("it returns no scores: it cannot rerank or classify", file="graph", key="outputs")
        check_inputs(spec, INPUTS - {"pooling_mask", ADAPTERS})
        self.folder = folder
        self.spec = spec
        self.truncate = truncate
        self.tokenizer = TextTokenizer(folder, spec.tokenizer, lower_case=spec.lower_case)
        self.tokenizer_id = identify_tokenizer(self.tokenizer, spec)
        self.tokenizer_bytes = self.tokenizer.size
        self._head = spec.score
        prompt = spec.prompts.get(spec.default_prompt_name, "") if spec.default_prompt_name else ""
        self._prompt = prompt if spec.score.template is None else ""
        self._pairs: _Tokenizer = (
            PairTokenizer(self.tokenizer, spec.tokenizer, spec.max_tokens)
            if spec.score.template is None
            else self._open_template(prompt)
        )
        self._instructed = lru_cache(maxsize=KEPT_INSTRUCTIONS)(self._open_template)
        self.takes_instruction = spec.score.template is not None and reads_prompt(spec.score.template)
        self._has_token_types = TYPES in spec.inputs
        super().__init__(
            max_tokens=spec.max_tokens,
            frame=self._pairs.overhead,
            max_chars=spec.max_tokens * CHARS_PER_TOKEN,
        )

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        return pad_batch(batch, facts, self.spec)

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Array | ShoalError]:
        logits = outputs[self._head.output][: len(batch)].reshape(len(batch), -1)
        return score_rows(logits, self._head.activation, [item.extra for item in batch])

    def _read_options(self, task: BatchTask) -> _ItemOptions:
        """Raises InvalidValue for an invalid document limit, and as `_instruct`."""
        assert not isinstance(task, Embed)
        instruction = task.instruction if isinstance(task, Rerank) else None
        return _ItemOptions(
            pairs=self._pairs if instruction is None else self._instruct(instruction),
            prompt=self._prompt,
            raw=task.raw_scores,
            truncate=self.truncate if task.truncate is None else task.truncate,
            direction=task.truncation_direction,
            max_document_tokens=read_document_limit(task),
        )

    def _tokenize(self, inputs: Sequence[TextInput[_ItemOptions]]) -> list[FramedText | ShoalError]:
        places: dict[_Tokenizer, list[int]] = {}
        for place, each in enumerate(inputs):
            places.setdefault(each.options.pairs, []).append(place)
        found: dict[int, FramedText | ShoalError] = {}
        for pairs, own in places.items():
            found |= zip(own, pairs.read([_to_reading(inputs[place]) for place in own]), strict=True)
        return [found[place] for place in range(len(inputs))]

    def _open_template(self, prompt: str) -> TemplateTokenizer | ApartTokenizer:
        template = self._head.template
        assert template is not None
        kind = ApartTokenizer if template.apart else TemplateTokenizer
        return kind(self.tokenizer, template, self.spec.max_tokens, prompt)

    def _instruct(self, instruction: str) -> TemplateTokenizer | ApartTokenizer:
        """Return the tokenizer of the model's template with this instruction. Raises EmptyInput, and InvalidValue for
        one that it cannot hold."""
        template = self._head.template
        assert template is not None  # the gateway has refused an instruction that has no place in the template
        if not instruction.strip():
            raise EmptyInput("the instruction is empty: omit it for the model's default", param="instruction")
        if len(instruction) > MAX_INSTRUCTION_CHARS:
            why = f"the instruction has {len(instruction)} characters: shorten it to {MAX_INSTRUCTION_CHARS}"
            raise InvalidValue(why, param="instruction")
        try:
            return self._instructed(instruction)
        except ModelFileError as error:
            why = error.message.removeprefix(f"{template.file}: ")
            raise InvalidValue(f"the model cannot take this instruction: {why}", param="instruction") from None

    def _prepare_ids(self, ids: list[int], options: _ItemOptions) -> Entry:
        return token_ids_error()

    def _prepare_text(self, item: TextInput[_ItemOptions], framed: FramedText) -> Entry:
        options = item.options
        if not framed.ids:
            return EmptyInput("the model's tokenizer produces no tokens for this text", param="input")
        if not framed.fits and not options.truncate:
            return too_long_error(framed.total, framed.exact, self.spec.max_tokens)
        ids = np.array(framed.ids, dtype=np.int64)
        tensors = {IDS: ids}
        if self._has_token_types and framed.second is not None:
            tensors[TYPES] = np.array(options.pairs.types(framed), dtype=np.int64)
        count = len(framed.ids)
        return Prepared(
            tensors=tensors,
            cost=count,
            group=(),
            outputs=(self._head.output,),
            tokens=count,
            truncated=framed.cut,
            key=(ids.tobytes(), None if framed.second is None else framed.first, options.raw),
            extra=options.raw,
        )


def _to_reading(item: TextInput[_ItemOptions]) -> PairInput:
    return PairInput(item.text, item.pair, item.options.direction, item.options.max_document_tokens)


def read_document_limit(task: BatchTask) -> int | None:
    """Return a task's limit on the tokens of a document, or None. Raises InvalidValue for a limit below 1."""
    limit = task.max_document_tokens if isinstance(task, Rerank) else None
    if limit is not None and limit < 1:
        raise InvalidValue(f"the document limit must be at least 1 token (got {limit})", param="max_tokens_per_doc")
    return limit


def token_ids_error() -> InvalidValue:
    """Return the error for token ids sent to a scoring task."""
    return InvalidValue("only texts can be scored, not token ids: send the text itself", param="input")

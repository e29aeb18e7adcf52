"""The base of the text pipelines: it reads each task's options once and tokenizes all texts of a job in one call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from shoal.core.protocols import CountedRow, EngineFacts, Prepared, Row, Tensors, WorkWeight
from shoal.decoding import msgpack_decoder
from shoal.errors import ShoalError
from shoal.pipelines.text.options_cache import OptionsCache
from shoal.types import Array, BatchTask, Image, Item, TextPair

TOKENIZED_ESTIMATE = 4
"""Tokens that can be made in the time in which a short text is prepared whose tokens came with it; one more for each
TOKENS_A_TOKEN that came."""
TOKENS_A_TOKEN = 32

Entry: TypeAlias = Prepared | ShoalError


class TextOptions(Protocol):
    """A task's options for each of its items; the base needs only the prompt before each text."""

    @property
    def prompt(self) -> str: ...


Options = TypeVar("Options", bound=TextOptions)
Tokenized = TypeVar("Tokenized")


class TextInput(NamedTuple, Generic[Options]):
    """A text with its prompt, the second text of a pair (None: a single text), and the options of their task."""

    text: str
    pair: str | None
    options: Options


class TokenizedItem(msgspec.Struct, frozen=True):
    """A text or a pair whose tokens came with it."""

    item: str | TextPair
    tokens: Any


class BasePipeline(ABC, Generic[Options, Tokenized]):
    """A Pipeline of texts, pairs of texts and token ids.

    A subclass reads a task's options, tokenizes the texts of a job, prepares each of them and each list of token ids,
    collates prepared items to a batch, and finishes the engine's rows.

    `max_tokens`: maximum estimate of a text, with its `frame` special tokens. `max_chars`: a text of more characters is
    read in pieces and estimated in full, since tokenizing it is not a small job.
    """

    takes_instruction = False
    """Whether a Rerank may have an instruction."""
    packed_type: ClassVar[Any] = None
    """The type of `Tokenized`, where another process may tokenize (see SharesTokenizer)."""

    def __init__(
        self, *, max_tokens: int, frame: int = 0, max_chars: float = math.inf, work: WorkWeight = "usual"
    ) -> None:
        self.work = work
        self._frame = frame
        self._max_tokens = max_tokens
        self._max_chars = max_chars
        self._options: OptionsCache[Options] = OptionsCache()
        if self.packed_type is not None:
            self._unpack = msgpack_decoder(list[self.packed_type | None]).decode  # type: ignore[name-defined]

    def check(self, task: BatchTask) -> None:
        """Raises what `_read_options` raises."""
        self._options.get_or_compute(task, self._read_options)

    def estimate(self, item: Item | TokenizedItem) -> int:
        """Estimate a text at 3 bytes of UTF-8 a token; unpaired surrogates count too."""
        assert not isinstance(item, Image)
        if isinstance(item, TokenizedItem):
            return TOKENIZED_ESTIMATE + len(item.tokens.ids) // TOKENS_A_TOKEN
        if isinstance(item, list):
            return max(1, len(item))
        texts = (item,) if isinstance(item, str) else item
        length = sum(map(len, texts))
        if length > self._max_chars:
            return self._frame + length // 3
        size = sum([len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts])
        return max(1, min(self._max_tokens, self._frame + size // 3))

    def tokenize(self, task: BatchTask) -> bytes:
        """See SharesTokenizer. Images, token ids and texts that cannot be read are left to the other pipeline."""
        options = self._options.get_or_compute(task, self._read_options)
        items = task.items
        found: list[Tokenized | None] = [None] * len(items)
        inputs = {
            place: _to_input(item, options) for place, item in enumerate(items) if not isinstance(item, list | Image)
        }
        for place, read in zip(inputs, self._tokenize(list(inputs.values())), strict=True):
            found[place] = None if isinstance(read, ShoalError) else read
        return msgspec.msgpack.encode(found)

    def unpack_tokens(self, packed: bytes, items: Sequence[Any]) -> list[Item | TokenizedItem]:
        """See SharesTokenizer."""
        return [
            item if tokens is None else TokenizedItem(item, tokens)
            for item, tokens in zip(items, self._unpack(packed), strict=True)
        ]

    def prepare(self, items: Sequence[tuple[BatchTask, Item | TokenizedItem]]) -> list[Entry]:
        """Read options once per run of neighboring items of a task; if that raises a ShoalError, all of them fail with
        it."""
        entries: list[Entry | None] = []
        inputs: list[TextInput[Options]] = []
        places: list[int] = []
        last: BatchTask | None = None
        options: Options | ShoalError
        for task, item in items:
            if task is not last:
                last = task
                try:
                    options = self._options.get_or_compute(task, self._read_options)
                except ShoalError as error:
                    options = error
            if isinstance(options, ShoalError):
                entries.append(options)
            elif isinstance(item, list):
                entries.append(self._prepare_ids(item, options))
            elif isinstance(item, TokenizedItem):
                entries.append(self._prepare_text(_to_input(item.item, options), item.tokens))
            else:
                assert not isinstance(item, Image)
                inputs.append(_to_input(item, options))
                places.append(len(entries))
                entries.append(None)
        if inputs:
            for place, each, read in zip(places, inputs, self._tokenize(inputs), strict=True):
                entries[place] = read if isinstance(read, ShoalError) else self._prepare_text(each, read)
        return [entry for entry in entries if entry is not None]

    @abstractmethod
    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]: ...

    @abstractmethod
    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> Sequence[Row | CountedRow | ShoalError]: ...

    @abstractmethod
    def _read_options(self, task: BatchTask) -> Options:
        """Return the task's options, or raise the error of a task that is invalid as a whole. All tasks that differ
        only in their inputs share the result."""

    @abstractmethod
    def _tokenize(self, inputs: Sequence[TextInput[Options]]) -> Sequence[Tokenized | ShoalError]:
        """Tokenize, or only count, the texts of several tasks: one entry per input, in order."""

    @abstractmethod
    def _prepare_text(self, item: TextInput[Options], tokenized: Tokenized) -> Entry: ...

    @abstractmethod
    def _prepare_ids(self, ids: list[int], options: Options) -> Entry: ...


def _to_input(item: str | TextPair, options: Options) -> TextInput[Options]:
    text, pair = (item, None) if isinstance(item, str) else item
    return TextInput(options.prompt + text, pair, options)

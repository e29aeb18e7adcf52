"""A scripted model, which lets users try overload, failures and cancellation without a real model.

Its vectors are a function of the words that the engine received, computed from the padded tensors, so they reveal a row
that went to the wrong caller or lost its mask or its order (`compute_vector` returns the expected vector). Generation
repeats the words of the prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np

from shoal.core.protocols import (
    CostModel,
    EngineFacts,
    GeneratorFacts,
    Piece,
    Prepared,
    Prompt,
    Row,
    Tensors,
    VectorSet,
    WorkWeight,
)
from shoal.errors import (
    AddressError,
    DeadlineExceeded,
    EngineFailed,
    InputRejected,
    InvalidValue,
    NotFinite,
    OutOfMemory,
    ShoalError,
    TooLong,
    TransportFailed,
)
from shoal.types import (
    Array,
    BatchTask,
    Context,
    Embed,
    Image,
    Item,
    Modality,
    Sampling,
    SparseVector,
    TokenLogprob,
    VectorKind,
)

MAX_TOKENS = 512
BATCHES_KEPT = 4096
RANGES: Mapping[str, tuple[float, float]] = {
    "delay_ms": (0, 3_600_000),
    "token_us": (0, 1_000_000),
    "slots": (1, 256),
    "parallel": (0, 256),
    "dimension": (1, 65_536),
    "max_batch_size": (1, 65_536),
    "padded": (0, 1),
    "memory_tokens": (0, 2**31),
    "token_ms": (0, 3_600_000),
    "labels": (0, 65_536),
    "images": (0, 1),
}
"""Minimum and maximum of each number, to bound the memory and time of a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """The behavior of the model. Its address sets any field, as in `fake:delay_ms=5:slots=2`.

    - `delay_ms`: milliseconds per batch. `token_us`: microseconds per padded token. `parallel`: as in EngineFacts.
    - `poison`: a word whose batch fails without a reason. `reject`: a word whose batch is rejected as invalid input.
      `nan`: a word whose row becomes NaN.
    - `memory_tokens`: padded tokens above which a batch runs out of memory; 0 means unlimited.
    - `token_ms`: milliseconds per generated word.
    - `vectors`: the kinds of vectors, joined by "+".
    - `labels`: above 0, the model is a classifier with this many labels, or a reranker if 1, and neither embeds nor
      generates.
    - `images`: 1 to accept images, each of which counts as one word, see `image_word`. They are not decoded.
    """

    delay_ms: float = 0.0
    token_us: float = 0.0
    slots: int = 1
    parallel: int = 0
    dimension: int = 32
    max_batch_size: int = 64
    padded: int = 1
    memory_tokens: int = 0
    poison: str = "poison-item"
    reject: str = "reject-item"
    nan: str = "nan-item"
    token_ms: float = 0.0
    vectors: str = "dense"
    labels: int = 0
    images: int = 0

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return ("text", "image") if self.images else ("text",)

    @property
    def kinds(self) -> tuple[VectorKind, ...]:
        return tuple(kind for kind in get_args(VectorKind) if kind in self.vectors.split("+"))

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(f"LABEL_{number}" for number in range(self.labels))

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> FakeScript:
        """Parse an address's options. Raises AddressError, which names the option."""
        kinds = {field.name: {"int": int, "float": float}.get(str(field.type), str) for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, text in options.items():
            if key not in kinds:
                raise AddressError(f"fake: unknown option {key!r}; valid options: {', '.join(kinds)}")
            try:
                values[key] = kinds[key](text)
            except ValueError:
                raise AddressError(f"fake: {key}={text!r} is not a number") from None
            if key in RANGES and not RANGES[key][0] <= values[key] <= RANGES[key][1]:
                least, most = RANGES[key]
                raise AddressError(f"fake: {key} must be between {least} and {most} (got {text})")
        if unknown := set(str(values.get("vectors", "dense")).split("+")) - set(get_args(VectorKind)):
            raise AddressError(f"fake: vectors={unknown.pop()!r} is not one of {', '.join(get_args(VectorKind))}")
        return cls(**values)


@lru_cache(maxsize=65_536)
def word_id(word: str) -> int:
    """Return the token of a word: 31 bits of its hash, never 0."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") % (2**31 - 1) + 1


def compute_vector(ids: Sequence[int], dimension: int) -> Array:
    """Return the vector of a token sequence: float32 [dimension], each value a byte of the hash of the ids."""
    vector: Array = _compute_vectors([np.asarray(ids)], dimension)[0]
    return vector


def _compute_vectors(rows: Sequence[Array], dimension: int) -> Array:
    """Return the vectors of several token sequences: float32 [n, dimension]."""
    digests = [hashlib.shake_128(ids.astype("<i8", copy=False).data).digest(dimension) for ids in rows]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(rows), dimension).astype(np.float32)


def image_word(image: Image) -> str:
    """Return the word for an image, from a hash of its bytes."""
    return f"picture-{hashlib.sha256(image.data).hexdigest()}"


def tokenize_item(item: Item) -> list[int]:
    """Tokenize an item by words. Ids stay unchanged; a pair becomes both texts' words with "|" between them."""
    if isinstance(item, Image):
        item = image_word(item)
    if isinstance(item, tuple):
        item = " | ".join(item)
    return [word_id(word) for word in item.split()] if isinstance(item, str) else list(item)


def compute_scores(ids: Sequence[int], labels: int, *, raw: bool) -> Array:
    """Return the scores of a token sequence, float32 [labels]: its `compute_vector` scaled to -4..4. Unless `raw`, a
    sigmoid (one label) or a softmax is applied."""
    logits: Array = (compute_vector(ids, labels) - 128) / 32
    if raw:
        return logits
    if labels == 1:
        powers = np.exp(-logits)
        scores: Array = 1 / (1 + powers)
        return scores
    powers = np.exp(logits)
    scores = powers / powers.sum()
    return scores


class FakePipeline:
    """Pipeline with one token per word. It truncates to MAX_TOKENS, checks dimensions, and normalizes on request.

    The sparse vector counts each word; the multi-vector is the unit vector of each word alone; the token vectors are
    the same before normalization.
    """

    def __init__(self, script: FakeScript) -> None:
        self._dimension = script.dimension
        self._labels = script.labels

    @property
    def work(self) -> WorkWeight:
        return "usual"

    def check(self, task: BatchTask) -> None:
        most = self._dimension
        if isinstance(task, Embed) and task.dimensions is not None and not 1 <= task.dimensions <= most:
            raise InvalidValue(f"dimensions must be between 1 and {most}", param="dimensions")

    def estimate(self, item: Item) -> int:
        if isinstance(item, Image):
            return 1
        if isinstance(item, list):
            return len(item)
        size = len(item) if isinstance(item, str) else sum(map(len, item))
        return min(size // 3, MAX_TOKENS) + 1

    def prepare(self, items: Sequence[tuple[BatchTask, Item]]) -> list[Prepared | ShoalError]:
        return [self._prepare(task, item) for task, item in items]

    def _prepare(self, task: BatchTask, item: Item) -> Prepared | ShoalError:
        ids = tokenize_item(item)
        if isinstance(item, list) and any(not 0 < token < 2**31 for token in ids):
            return InvalidValue("token ids must be between 1 and 2147483647", param="input")
        if len(ids) > MAX_TOKENS and task.truncate is False:
            return TooLong(f"the input has {len(ids)} tokens, the model takes at most {MAX_TOKENS}", param="input")
        kept = (ids[:MAX_TOKENS] if task.truncation_direction == "right" else ids[-MAX_TOKENS:]) or [word_id("")]
        options: Any = task.raw_scores if not isinstance(task, Embed) else _VectorOptions.from_task(task)
        return Prepared(
            tensors={"ids": np.asarray(kept, dtype=np.int64)},
            cost=len(kept),
            group=(),
            outputs=("embedding",),
            tokens=min(len(ids), MAX_TOKENS),
            truncated=len(ids) > MAX_TOKENS,
            key=(tuple(kept), options),
            extra=options,
        )

    def collate(self, batch: Sequence[Prepared], facts: EngineFacts) -> dict[str, Array]:
        length = max(item.cost for item in batch)
        ids = np.zeros((len(batch), length), dtype=np.int64)
        for row, item in zip(ids, batch, strict=True):
            row[: item.cost] = item.tensors["ids"]
        return {"ids": ids}

    def finish(self, outputs: Tensors, batch: Sequence[Prepared]) -> list[Row | ShoalError]:
        rows: list[Row | ShoalError] = []
        vectors = outputs["embedding"]
        finite: list[bool] = np.isfinite(vectors).all(axis=1).tolist()  # type: ignore[assignment]  # one a row
        for row, is_finite, item in zip(vectors, finite, batch, strict=False):
            if not is_finite:
                rows.append(NotFinite("the model answered NaN for this input"))
            elif isinstance(item.extra, _VectorOptions):
                rows.append(item.extra.select(row, item.tensors["ids"].tolist()))
            else:
                rows.append(compute_scores(item.tensors["ids"].tolist(), self._labels, raw=item.extra))
        return rows


class _VectorOptions(NamedTuple):
    """The options of a task for its vectors."""

    dimensions: int | None
    normalize: bool
    kinds: tuple[VectorKind, ...]

    @classmethod
    def from_task(cls, task: Embed) -> _VectorOptions:
        return cls(task.dimensions, task.normalize, task.outputs)

    def select(self, row: Array, ids: list[int]) -> Row:
        cut = row[: self.dimensions]
        dense = cut / max(float(np.linalg.norm(cut)), 1e-12) if self.normalize else cut
        if self.kinds == ("dense",):
            return dense
        words = np.stack([compute_vector([word], row.shape[0]) for word in ids])
        indices, counts = np.unique(np.asarray(ids, dtype=np.int32), return_counts=True)
        return VectorSet(
            dense=dense if "dense" in self.kinds else None,
            tokens=words if "tokens" in self.kinds else None,
            sparse=SparseVector(indices, counts.astype(np.float32)) if "sparse" in self.kinds else None,
            multi=words / np.linalg.norm(words, axis=1, keepdims=True) if "multi" in self.kinds else None,
        )


class FakeEngine:
    """Computes `compute_vector` of each unpadded row after the scripted time.

    `online` and `broken` are switches to simulate failures; `batches` has the (items, length) of each call.
    """

    def __init__(self, script: FakeScript, name: str = "fake") -> None:
        self.online = True
        self.broken = False
        self.batches: deque[tuple[int, int]] = deque(maxlen=BATCHES_KEPT)
        self.running = 0
        self.cancelled = 0
        self._script = script
        self._cores = asyncio.Semaphore(script.parallel or script.slots)
        self._trigger_ids = {kind: word_id(getattr(script, kind)) for kind in ("poison", "reject", "nan")}
        self.facts = EngineFacts(
            name=name,
            inputs=("ids",),
            outputs=("embedding",),
            slots=script.slots,
            parallel=script.parallel,
            max_batch_size=script.max_batch_size,
            pads_batches=bool(script.padded),
            length_buckets=(4, 8, 16, 32, 64, 128, 256, 512),
            cost=CostModel(max(script.delay_ms / 1e3, 1e-5), max(script.token_us / 1e6, 1e-9)),
        )

    def ready(self) -> bool:
        return self.online

    async def aclose(self) -> None:
        self.online = False

    async def infer(
        self, inputs: Tensors, outputs: Sequence[str], params: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        ids = inputs["ids"]
        self.batches.append((ids.shape[0], ids.shape[1]))
        if self.running >= self._script.slots:
            raise EngineFailed("more batches than slots")
        self.running += 1
        try:
            seconds = self._script.delay_ms / 1e3 + self._script.token_us / 1e6 * ids.size
            if seconds:
                async with asyncio.timeout(deadline - asyncio.get_running_loop().time()):
                    async with self._cores:
                        await asyncio.sleep(seconds)
        except TimeoutError:
            raise DeadlineExceeded("the engine did not answer in time") from None
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        tokens = set(ids.ravel().tolist())
        self._fail_as_scripted(ids.size, tokens)
        rows = _compute_vectors([row[row > 0] for row in ids], self._script.dimension)
        if self._trigger_ids["nan"] in tokens:
            rows[(ids == self._trigger_ids["nan"]).any(axis=1)] = np.nan
        return {"embedding": rows}

    def _fail_as_scripted(self, size: int, tokens: set[int]) -> None:
        if not self.online:
            raise TransportFailed("the replica is gone")
        if self.broken or self._trigger_ids["poison"] in tokens:
            raise EngineFailed("the engine failed without a reason")
        if self._trigger_ids["reject"] in tokens:
            raise InputRejected("the engine refused an input")
        if self._script.memory_tokens and size > self._script.memory_tokens:
            raise OutOfMemory(f"{size} tokens do not fit into memory")


CHAT_TEMPLATE = "{{ messages[-1].content }}"
"""The chat template of a fake model, which uses only the last message."""

SUPPORTED_PARAMETERS = frozenset(
    {"max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"}
    | {"logit_bias", "logprobs"}
)


class FakeGenerator:
    """Repeats the prompt's words, one piece per word, up to `max_tokens`, and starts over if `min_tokens` is larger
    than their number. Generation fails without a reason at the word `poison`; a prompt with `reject` is rejected.

    The log probability of the word at index `i` is -i / 10. `produced` counts generated words, `closed` the finished
    answers, `running` the answers in flight; `online` is a switch to simulate failures.
    """

    def __init__(self, script: FakeScript, name: str = "fake") -> None:
        self.online = True
        self.produced = 0
        self.closed = 0
        self.running = 0
        self._script = script
        self._facts = GeneratorFacts(name=name, parameters=SUPPORTED_PARAMETERS, adapters=("loud",))

    @property
    def facts(self) -> GeneratorFacts:
        return self._facts

    async def generate(
        self, prompt: Prompt, sampling: Sampling, ctx: Context, *, adapter: str = "", stream: bool = True
    ) -> AsyncGenerator[Piece]:
        words = (prompt.text.upper() if adapter == "loud" else prompt.text).split() or [""]
        if self._script.reject in words:
            raise InputRejected("the model refused the prompt")
        most = max(len(words), sampling.min_tokens or 0)
        count = most if sampling.max_tokens is None else min(most, sampling.max_tokens)
        self.running += 1
        try:
            for at in range(count):
                await self._pause(ctx)
                word = words[at % len(words)]
                if word == self._script.poison:
                    raise EngineFailed("the model failed without a reason")
                self.produced += 1
                text = f" {word}" if at else word
                logprobs = () if sampling.logprobs is None else (_logprob(text, at, sampling.logprobs),)
                reason = None if at < count - 1 else "stop" if count == most else "length"
                yield Piece(text=text, tokens=1, prompt_tokens=len(words), finish_reason=reason, logprobs=logprobs)
        finally:
            self.running -= 1
            self.closed += 1

    async def _pause(self, ctx: Context) -> None:
        if not self.online:
            raise TransportFailed("the replica is gone")
        if ctx.remaining(asyncio.get_running_loop().time()) <= 0:
            raise DeadlineExceeded("the stream exceeded its deadline")
        await asyncio.sleep(self._script.token_ms / 1e3)

    def ready(self) -> bool:
        return self.online

    async def aclose(self) -> None:
        self.online = False


def _logprob(text: str, at: int, count: int) -> TokenLogprob:
    top = [TokenLogprob(token=f"{text}{number or ''}", logprob=-(at + number) / 10) for number in range(count)]
    return TokenLogprob(token=text, logprob=-at / 10, top=top)

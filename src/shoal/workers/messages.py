"""The messages between a front and the model process: MessagePack, an array each, its tag first."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from shoal.core.lifecycle.states import State
from shoal.core.packed_error import PackedError
from shoal.core.protocols import BatchReport, GenerationReport, ModelFacts, ReplicaStatus
from shoal.core.recording import Found
from shoal.decoding import msgpack_decoder
from shoal.types import (
    BatchFacts,
    BatchTask,
    Chunk,
    Context,
    Embedded,
    Generate,
    Result,
    Scored,
    TaskKind,
    TrafficClass,
    decode_array,
    encode_array,
    pack,
    unpack,
)

Headers: TypeAlias = list[tuple[bytes, bytes]]

TICK_S = 1.0

_NO_SCORES = np.empty((0, 0), np.float32)


class _Message(msgspec.Struct, array_like=True):
    """`id`: of the call that it belongs to, chosen by the front."""


class Hello(_Message, tag=0):
    """The first message of a front. `token`: the secret of the model process, where one is asked for."""

    pid: int
    token: bytes = b""


class Run(_Message, tag=1):
    id: int
    task: BatchTask
    ctx: Context


class Stream(_Message, tag=2):
    """`task`: a packed Generate."""

    id: int
    task: bytes
    ctx: Context

    @classmethod
    def of(cls, number: int, task: Generate, ctx: Context) -> Stream:
        return cls(number, pack(task), ctx)

    def unpack_task(self) -> Generate:
        return unpack(self.task, Generate)


class More(_Message, tag=3):
    """The front has read `count` more chunks, or one more event of a response."""

    id: int
    count: int = 1


class Cancel(_Message, tag=4):
    id: int


class Wake(_Message, tag=5):
    """Wake a model; the answer is Done."""

    id: int
    model: str
    ctx: Context


class AwaitServers(_Message, tag=6):
    """Wait for the first answer of a server; the answer is Done."""

    id: int
    deadline: float


class Refused(_Message, tag=7):
    """A front rejected a request. No answer."""

    kind: str
    surface: str


class Lag(_Message, tag=8):
    """How late a front's event loop was. No answer."""

    seconds: float


class Accepted(_Message, tag=12):
    """A front accepted a request for a model that it runs itself. As Observer.accepted; no answer."""

    model: str
    task: TaskKind
    items: int
    traffic: TrafficClass
    surface: str


class Finished(_Message, tag=13):
    """The end of an accepted request. As Observer.finished, with what is counted of the result."""

    model: str
    task: TaskKind
    outcome: str
    seconds: float
    surface: str
    tokens: list[int] | None = None
    truncated: int = 0
    facts: BatchFacts = BatchFacts()

    @classmethod
    def of(
        cls, model: str, task: TaskKind, outcome: str, seconds: float, result: Result | None, surface: str
    ) -> Finished:
        if result is None:
            return cls(model, task, outcome, seconds, surface)
        return cls(model, task, outcome, seconds, surface, result.tokens, result.truncated, result.facts)

    def to_result(self) -> Result | None:
        """Return a result without scores, for observers."""
        if self.tokens is None:
            return None
        return Scored(scores=_NO_SCORES, tokens=self.tokens, truncated=self.truncated, facts=self.facts)


class Batched(_Message, tag=14):
    report: BatchReport


class Generated(_Message, tag=15):
    report: GenerationReport


class Replicas(_Message, tag=17):
    """The replicas of the models that a front runs itself, each with its model's name. No answer."""

    replicas: list[tuple[str, ReplicaStatus]]


class Known(_Message, tag=9):
    """A front has read the Models of this version."""

    version: int


class Request(_Message, tag=10):
    """A whole HTTP request. Its front sends the body as Events, each when it is asked with Receive. `traced`: its
    `traceparent` is the front's own."""

    id: int
    method: str
    path: str
    query: bytes
    headers: Headers
    client: tuple[str, int]
    traced: bool = False


class Event(_Message, tag=11):
    """An ASGI event of a request: a piece of its body, or its client's disconnect."""

    id: int
    body: bytes
    more_body: bool
    disconnected: bool = False


class Recorded(_Message, tag=16):
    """The answer to LookUp."""

    id: int
    found: Found


Report: TypeAlias = Refused | Lag | Accepted | Finished | Batched | Generated | Replicas
"""What a front has seen, for the observer of the model process."""

FromFront: TypeAlias = (
    Hello | Run | Stream | More | Cancel | Wake | AwaitServers | Known | Request | Event | Recorded | Report
)


class Failure(_Message, tag=5):
    id: int
    error: PackedError


class ModelState(msgspec.Struct, frozen=True):
    """A served model, as in the registry. `usable`: whether a request would be answered now. `remote`: how a front can
    run it without the model process, `tokenizer`: how it can tokenize for it (see ModelServer); empty if it cannot."""

    name: str
    aliases: tuple[str, ...]
    default_for: tuple[TaskKind, ...]
    created: int
    state: State
    note: str
    is_sleeping: bool
    required: bool
    usable: bool
    facts: ModelFacts | None
    error: PackedError | None
    remote: bytes = b""
    tokenizer: bytes = b""


class Models(_Message, tag=0):
    """All models, in order, and the servers whose models are not known yet (see Registry)."""

    version: int
    models: list[ModelState]
    pending_sources: dict[str, str]
    answered_sources: set[str]
    unloaded: dict[str, str]


class EmbedAnswer(_Message, tag=1):
    id: int
    result: Embedded


class ScoreAnswer(_Message, tag=2):
    id: int
    result: Scored


class Piece(_Message, tag=3):
    id: int
    chunk: Chunk


class Done(_Message, tag=4):
    """The end of a stream, of a response, or of a call without a result. `value`: what it returns, if anything."""

    id: int
    value: bool = False


class Receive(_Message, tag=6):
    """The model process asks for the next Event of a request."""

    id: int


class Start(_Message, tag=7):
    """The head of a response. The front answers this and each Body with More."""

    id: int
    status: int
    headers: Headers


class Body(_Message, tag=8):
    id: int
    body: bytes
    more_body: bool


class Tick(_Message, tag=9):
    """The model process is alive: sent every TICK_S."""


class LookUp(_Message, tag=11):
    """Ask for what a front knows of a request; `id` is chosen by the model process, and the answer is Recorded."""

    id: int
    request_id: str


class Leaving(_Message, tag=10):
    """The model process will stop: it answers the calls under way, and takes no new ones."""


ToFront: TypeAlias = (
    Tick | LookUp | Leaving | Models | EmbedAnswer | ScoreAnswer | Piece | Done | Failure | Receive | Start | Body
)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)

encode = _ENCODER.encode


def decoder_from_front() -> msgspec.msgpack.Decoder[FromFront]:
    return msgpack_decoder(FromFront, dec_hook=decode_array)


def decoder_to_front() -> msgspec.msgpack.Decoder[ToFront]:
    return msgpack_decoder(ToFront, dec_hook=decode_array)

"""What the gateway and the process of a language model tell each other: frames of MessagePack over a socket.

A frame is four bytes of length, big end first, and so many bytes. To the process: Open, once, then Start, Cancel and
Ping in any order; the end of the stream ends the process. Back: Opened or Refused, once, then a list of Produced after
each step and after whatever was said, an empty one where nothing came of it: a process that owes one and sends none is
stuck.
"""

from __future__ import annotations

import struct
from typing import Literal, TypeAlias

import msgspec

from shoal.decoding import msgpack_decoder
from shoal.types import Guide, Sampling

LENGTH = struct.Struct(">I")


class GenaiOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a model. Zeros and None choose.

    `context_tokens`: what the model was made for, prompt and answer together. `stop_ids`: tokens that end an answer,
    beside those that its generation_config.json names. `vocab_size`: width of its logits, where the graph leaves
    that open. `cache_heads`: for a graph whose state cannot be read off its file, (heads, width of a head) of each
    cached tensor, keys and values in turn.
    """

    precision: Literal["auto", "f32", "bf16"] = "auto"
    threads: int = 0
    max_streams: int = 256
    kv_cache_mb: int = 0
    kv_cache_precision: Literal["auto", "f32", "f16", "u8"] = "auto"
    dynamic_quantization: Literal["auto", "on", "off"] = "auto"
    prefix_caching: bool = True
    context_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    cache_heads: tuple[tuple[int, int], ...] = ()


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """`path`: a folder with openvino_model.xml, or a .gguf file."""

    path: str
    options: GenaiOptions


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Answer a prompt; `id` is new and never used again."""

    id: int
    ids: tuple[int, ...]
    sampling: Sampling


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Compile a guide beside the answers; `id` as for Start. A Produced without anything tells that it is done."""

    id: int
    guide: Guide


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Nobody reads this answer any more. It may be at its end already."""

    id: int


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Say something, if only an empty list."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """The model is loaded and has made a token. `quantized_together`: activations that share a scale in 8 bits, 0 when
    they are not rounded. `guided`: guided decoding is possible. `cache_tokens`, `cache_bytes`:
    room for contexts, 0 tokens where that is not known."""

    version: str
    precision: str
    kv_cache_precision: str
    quantized_together: int
    threads: int
    vocab_size: int
    guided: bool
    cache_tokens: int
    cache_bytes: int


class LoadRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The model cannot be loaded. `kind`: of the ShoalError it is; `file`: at fault, for "model_file"."""

    kind: Literal["model_file", "missing_extra", "config", "out_of_memory"]
    message: str
    file: str = ""


class Produced(msgspec.Struct, frozen=True, kw_only=True):
    """What a step made for one answer. `ids` are without the token that ended it, which `tokens` counts.

    `logprobs`: (bytes of the token, natural logarithm of its probability), one an id, where asked for. `finish`: it
    ended. `error`: it ended badly, (kind, message and param of the ShoalError).
    """

    id: int
    ids: list[int] = []
    tokens: int = 0
    logprobs: list[tuple[bytes, float]] = []
    finish: Literal["stop", "length"] | None = None
    error: tuple[str, str, str | None] | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Of the process that tries guides. `refused`: why one cannot be used, "" for a good one. `size`: bytes that it
    took and keeps. `worn`: this process has taken enough and ends."""

    refused: str = ""
    size: int = 0
    worn: bool = False


ToWorker: TypeAlias = Open | Start | Prepare | Cancel | Ping
FirstMessage: TypeAlias = Opened | LoadRefused

_ENCODER = msgspec.msgpack.Encoder()
decode_to_worker = msgpack_decoder(ToWorker).decode
decode_first = msgpack_decoder(FirstMessage).decode
decode_produced = msgpack_decoder(list[Produced]).decode


def encode_frame(message: ToWorker | FirstMessage | list[Produced]) -> bytes:
    """The bytes of one message, its length before it.

    Raises OverflowError for a number beyond 64 bits, UnicodeEncodeError for half a surrogate pair.
    """
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body

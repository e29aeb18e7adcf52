"""The protocol between the gateway and the process of a language model: MessagePack frames over a socket.

A frame is a length of four bytes, big-endian, followed by that many bytes. The gateway sends one Open, then Start,
Prepare, Cancel and Ping in any order; the end of the stream ends the process. The process sends one Opened or
LoadRefused, then a list of Produced after each step and each message, possibly empty: if one that is due does not
arrive, the process has hung.
"""

from __future__ import annotations

import struct
from typing import Literal, TypeAlias

import msgspec

from shoal.decoding import msgpack_decoder
from shoal.types import Guide, Sampling

LENGTH = struct.Struct(">I")


class GenaiOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a model. Zero and None select a default.

    `context_tokens`: the model's maximum of prompt and answer together. `stop_ids`: tokens that end an answer, beside
    those in its generation_config.json. `vocab_size`: width of its logits, if the graph leaves it dynamic.
    `cache_heads`: (heads, width of a head) of each cached tensor, keys and values alternating, for a graph file that
    does not show them.
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
    """Load a model. `path`: a folder with openvino_model.xml, or a .gguf file."""

    path: str
    options: GenaiOptions


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Answer a prompt. `id` is unique for the life of the process."""

    id: int
    ids: tuple[int, ...]
    sampling: Sampling


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Compile a guide while answers continue. `id` as for Start. An empty Produced reports success."""

    id: int
    guide: Guide


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop an answer that is no longer read. It may already have ended."""

    id: int


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Request a reply, which may be an empty list."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """The model is loaded and has generated a token. `quantized_together`: activations that share an 8-bit scale, 0 if
    they are not quantized. `guided`: guided decoding is possible. `cache_tokens`, `cache_bytes`: capacity of the KV
    cache, 0 tokens if unknown."""

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
    """The model cannot be loaded. `kind`: that of the ShoalError; `file`: the faulty file for "model_file"."""

    kind: Literal["model_file", "missing_extra", "config", "out_of_memory"]
    message: str
    file: str = ""


class Produced(msgspec.Struct, frozen=True, kw_only=True):
    """The output of a step for one answer. `ids` lacks the token that ended it; `tokens` counts that one too.

    `logprobs`: one (bytes of the token, natural logarithm of its probability) per id, if requested. `finish`: why the
    answer ended, None before. `error`: why it failed, as (kind, message, param) of the ShoalError.
    """

    id: int
    ids: list[int] = []
    tokens: int = 0
    logprobs: list[tuple[bytes, float]] = []
    finish: Literal["stop", "length"] | None = None
    error: tuple[str, str, str | None] | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a guide's trial. `refused`: why it cannot be used, "" if it can. `size`: bytes of memory that the
    compiled guide occupies. `needs_restart`: the trial process reached its memory limit and ends."""

    refused: str = ""
    size: int = 0
    needs_restart: bool = False


ToWorker: TypeAlias = Open | Start | Prepare | Cancel | Ping
FirstMessage: TypeAlias = Opened | LoadRefused

_ENCODER = msgspec.msgpack.Encoder()
decode_to_worker = msgpack_decoder(ToWorker).decode
decode_first = msgpack_decoder(FirstMessage).decode
decode_produced = msgpack_decoder(list[Produced]).decode


def encode_frame(message: ToWorker | FirstMessage | list[Produced]) -> bytes:
    """Return one message as a frame.

    Raises OverflowError for a number beyond 64 bits, UnicodeEncodeError for a lone surrogate.
    """
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body

"""Converts the responses of a language model on Triton to pieces: pure. Sources: as in `llm_schema`.

Each response has the text and ids of one piece: the new ones (vLLM, TensorRT-LLM) or all so far (its LLM API). Counts
are those of the one response. A response may hold several sequences; only one is requested, so only the first is read.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from struct import Struct
from typing import Any

from shoal.backends.base.finish_reasons import ABORTED_REASONS
from shoal.backends.triton.llm_request import GenerationRequest, ModelTokenizer
from shoal.backends.triton.llm_schema import LOG_PROBS, OUTPUT, OUTPUT_IDS, LlmSchema
from shoal.backends.triton.response import read_outputs, read_raw
from shoal.core.protocols import Piece
from shoal.errors import UpstreamFailed
from shoal.kserve.protocol_pb2 import ModelInferResponse
from shoal.types import Array, TokenLogprob

FINISH_REASONS = {"length": "length", "max_tokens": "length", "content_filter": "content_filter"}
"""Finish reasons other than "stop", which models name in many ways."""

UNFINISHED = ("", "none", "null")
"""Python's None as text is how vLLM and the LLM API mark an unfinished answer."""

REPLACED = "\N{REPLACEMENT CHARACTER}"
MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""

_COUNTS = frozenset({"num_input_tokens", "num_output_tokens"})
_KNOWN_OUTPUTS = frozenset({OUTPUT, OUTPUT_IDS, "sequence_length", "finish_reason", "logprobs", LOG_PROBS, *_COUNTS})
_SCALAR_NAMES = frozenset({"sequence_length", *_COUNTS})
_SCALAR_FORMATS = {"UINT32": Struct("<I"), "INT32": Struct("<i"), "UINT64": Struct("<Q"), "INT64": Struct("<q")}
_NOTHING = Piece()
_Decoder = codecs.getincrementaldecoder("utf-8")


class Answer:
    """The responses to one generation. `read` returns the piece of each, `end` the piece after the last."""

    def __init__(self, schema: LlmSchema, generation: GenerationRequest, words: ModelTokenizer | None = None) -> None:
        self._schema = schema
        self._request = generation
        self._vocabulary = words
        self._is_unary = not (generation.stream and schema.streams)
        self._decoder = _Decoder("replace")
        self._has_partial_character = False
        self._text = ""
        self._ids: list[int] = []
        self._cumulative: bool | None = None
        self._token_count: int | None = None
        self._prompt_tokens_sent = False
        self._finished = False

    def read(self, response: ModelInferResponse) -> Piece | None:
        """Return the piece of a response, None if empty. Raises UpstreamFailed if it is broken, or the model
        aborted."""
        found = _tensors(response)
        piece = Piece()
        sampling = self._request.sampling
        if OUTPUT_IDS in found:
            self._read_ids(piece, found)
        elif OUTPUT in found:
            self._read_text(piece, _expect_bytes(found[OUTPUT]))
        self._read_counts(piece, found)
        if sampling.logprobs is not None:
            if "logprobs" in found:
                piece.logprobs = _vllm_logprobs(_expect_bytes(found["logprobs"]), sampling.logprobs)
            elif LOG_PROBS in found:
                piece.logprobs = self._logprobs(piece, found[LOG_PROBS].reshape(-1).tolist())
        if "finish_reason" in found and (reason := _expect_bytes(found["finish_reason"])):
            piece.finish_reason = _finish_reason(reason.decode(errors="replace"))
            self._finished = piece.finish_reason is not None
        if self._finished:
            piece.text = self._rest(piece.text)
        return piece if piece.text or piece != _NOTHING else None

    def end(self) -> Piece | None:
        """Return the remaining text with the finish reason, None if a response had one: "length" if `max_tokens` tokens
        or more came, else "stop"."""
        if self._finished:
            return None
        most = self._request.sampling.max_tokens
        full = most is not None and self._token_count is not None and self._token_count >= most
        return Piece(text=self._rest(""), finish_reason="length" if full else "stop")

    def _rest(self, text: str) -> str:
        """Return the last text, including what was held back."""
        rest = self._decoder.decode(b"", True)
        return (self._text if self._schema.output_mode == "cumulative" else text) + rest

    def _read_text(self, piece: Piece, data: bytes) -> None:
        if self._schema.output_mode == "cumulative":
            self._decoder.reset()
            self._text = self._decoder.decode(data)
            # A partial character decodes to this until its other tokens come; `end` returns it otherwise.
            piece.text = self._text.rstrip(REPLACED)
            return
        text = self._decode_text(data)
        if self._is_unary and self._schema.includes_prompt:
            text = text.removeprefix(self._request.prompt.text)
        piece.text = text

    def _decode_text(self, data: bytes) -> str:
        """Decode bytes; a partial character at the end is kept for the next piece."""
        if not self._has_partial_character:  # nearly always, in a quarter of the incremental decoder's time
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._has_partial_character = bool(self._decoder.getstate()[0])
        return text

    def _read_ids(self, piece: Piece, found: dict[str, Any]) -> None:
        """Read the first sequence of [batch, beams, length], without padding."""
        rows = found[OUTPUT_IDS]
        ids = rows.reshape(-1, rows.shape[-1])[0].tolist() if rows.size else []
        length = _number(found.get("sequence_length"))
        if length is not None and 0 <= length <= len(ids):
            ids = ids[:length]  # a larger one includes earlier ids
        while ids and ids[-1] < 0:
            ids.pop()
        piece.ids = self._new_ids(ids)
        piece.tokens = len(piece.ids)
        self._token_count = (self._token_count or 0) + len(piece.ids)

    def _new_ids(self, ids: list[int]) -> list[int]:
        """Return the new ids. TensorRT-LLM streams only those, but its engines before `exclude_input_in_output` may
        return the prompt and all ids so far."""
        if not self._schema.includes_prompt:
            return ids
        prompt = list(self._request.prompt.ids or ())
        if prompt and len(ids) >= len(prompt) and ids[: len(prompt)] == prompt:
            ids = ids[len(prompt) :]
        if self._cumulative is None and self._ids and ids:
            self._cumulative = len(ids) > len(self._ids) and ids[: len(self._ids)] == self._ids
        if self._cumulative:
            ids = ids[len(self._ids) :]
        self._ids += ids
        return ids

    def _read_counts(self, piece: Piece, found: dict[str, Any]) -> None:
        if not self._prompt_tokens_sent and (count := _number(found.get("num_input_tokens"))) is not None:
            piece.prompt_tokens = count
            self._prompt_tokens_sent = True
        if piece.tokens is None and (count := _number(found.get("num_output_tokens"))) is not None:
            if self._is_unary and self._schema.includes_prompt and self._schema.family == "trtllm":
                return  # it includes the prompt's tokens
            piece.tokens = count
            self._token_count = (self._token_count or 0) + count

    def _logprobs(self, piece: Piece, values: Sequence[float]) -> list[TokenLogprob]:
        """Return the values of this piece's tokens, which are the last ones. An ensemble reports no tokens: all text of
        a piece goes to its first one."""
        fresh = values[-piece.tokens :] if piece.tokens else values
        if self._vocabulary is not None and piece.ids:
            texts = [self._vocabulary.piece(id) for id in piece.ids]
        else:
            texts = [piece.text] + [""] * (len(fresh) - 1)
        return [
            TokenLogprob(token=text, logprob=max(value, MIN_LOGPROB))
            for text, value in zip(texts, fresh, strict=False)  # some versions omit the last token's
        ]


def _tensors(response: ModelInferResponse) -> dict[str, Any]:
    """Return the tensors that matter here: arrays, but of texts the first one, and of a single count its value. Raises
    UpstreamFailed for broken contents."""
    outputs, raw = response.outputs[:], response.raw_output_contents[:]  # a slice takes half the time of iterating
    if not raw or len(raw) != len(outputs):
        return {
            name: array if array.dtype != object else array.reshape(-1)[0] if array.size else b""
            for name, array in read_outputs(response).items()
        }
    found: dict[str, Any] = {}
    for tensor, data in zip(outputs, raw, strict=True):
        # This runs once per token: an array of one value takes five times as long as the value.
        name, datatype = tensor.name, tensor.datatype
        if datatype == "BYTES":
            found[name] = _first_text(data)
        elif name in _SCALAR_NAMES and (one := _SCALAR_FORMATS.get(datatype)) is not None and len(data) == one.size:
            (found[name],) = one.unpack(data)
        elif name in _KNOWN_OUTPUTS:
            found[name] = read_raw(datatype, tuple(tensor.shape), data)
    return found


def _first_text(data: bytes) -> bytes:
    """Return the first text of raw contents, b"" if there is none."""
    end = 4 + int.from_bytes(data[:4], "little")
    if data and end > len(data):
        raise UpstreamFailed(f"a text in the model's response is truncated: {len(data)} bytes instead of {end}")
    return data[4:end]


def _expect_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise UpstreamFailed("the model returned numbers instead of a text")
    return value


def _number(value: Array | int | None) -> int | None:
    if value is None or isinstance(value, int):
        return value
    return int(value.reshape(-1)[0]) if value.size else None


def _finish_reason(reason: str) -> str | None:
    word = reason.strip().lower()
    if word in UNFINISHED:
        return None
    if word in ABORTED_REASONS:
        raise UpstreamFailed(f"the model aborted the answer ({reason}); see Triton's log")
    return FINISH_REASONS.get(word, "stop")


def _vllm_logprobs(data: bytes, limit: int) -> list[TokenLogprob]:
    """Parse `[{"id": {"logprob", "rank", "decoded_token"}, ...}, ...]`: one object per token, the chosen one first."""
    try:
        tokens = json.loads(data or b"null") or []  # accepts -Infinity, as Python writes it
        return [_vllm_token(list(token.values()), limit) for token in tokens if token]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UpstreamFailed(f"the model returned invalid logprobs: {error!r}") from error


def _vllm_token(candidates: Sequence[dict[str, Any]], limit: int) -> TokenLogprob:
    ranked = sorted(candidates, key=lambda each: each["rank"] or 0)[:limit]
    top = [TokenLogprob(token=each["decoded_token"] or "", logprob=_to_finite(each["logprob"])) for each in ranked]
    chosen = candidates[0]
    return TokenLogprob(token=chosen["decoded_token"] or "", logprob=_to_finite(chosen["logprob"]), top=top)


def _to_finite(value: float) -> float:
    return max(float(value), MIN_LOGPROB)

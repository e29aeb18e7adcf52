"""Convert fields of completions to `Sampling` and `Guide`. Raises RequestErrors that name the field."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from shoal.errors import InvalidValue, WrongType
from shoal.http.json.decoder import to_request_error
from shoal.http.json.extras import check_depth, check_pieces, to_json_bytes
from shoal.surfaces.shared import wire_sampling as wire
from shoal.surfaces.shared.wire_conversations import Json
from shoal.types import Guide, Sampling

MAX_BIASES = 4096


class _NamedSchema(msgspec.Struct):
    schema: Json = msgspec.UNSET


_ANY = msgspec.json.Decoder()
_NAMED = msgspec.json.Decoder(_NamedSchema)
_BIASES = msgspec.json.Decoder(dict[str, float])
_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_ID = re.compile(r"[0-9]{1,10}")
_ENCODE = msgspec.json.Encoder()
_TOO_MANY = "%s and %s both constrain the answer; send one of them."


def to_sampling(
    payload: wire.SamplingFields, *, max_tokens: int | None, logprobs: int | None, guide: Guide | None
) -> Sampling:
    """Convert all sampling fields of a request."""
    return Sampling(
        max_tokens=None if max_tokens == -1 else max_tokens,
        min_tokens=payload.min_tokens,
        temperature=payload.temperature,
        top_p=payload.top_p,
        top_k=-1 if payload.top_k == 0 else payload.top_k,
        min_p=payload.min_p,
        seed=payload.seed,
        stop=_parse_stops(payload.stop),
        stop_token_ids=payload.stop_token_ids or [],
        include_stop=payload.include_stop_str_in_output,
        presence_penalty=payload.presence_penalty,
        frequency_penalty=payload.frequency_penalty,
        repetition_penalty=payload.repetition_penalty,
        length_penalty=payload.length_penalty,
        logit_bias=_parse_biases(to_json_bytes(payload.logit_bias)),
        logprobs=logprobs,
        bad_words=payload.bad_words or [],
        ignore_eos=payload.ignore_eos,
        skip_special_tokens=payload.skip_special_tokens,
        guide=guide,
    )


def to_guide(payload: wire.SamplingFields) -> Guide | None:
    """Return the guide of a request, from any of its fields. Raises InvalidValue if there are two."""
    if not (
        payload.response_format
        or payload.structured_outputs
        or payload.guided_json
        or payload.guided_regex
        or payload.guided_choice
        or payload.guided_grammar
    ):
        return None
    found: dict[str, Guide | None] = {
        "response_format": None if payload.response_format is None else format_guide(payload.response_format),
        "guided_json": schema_guide(to_json_bytes(payload.guided_json), "guided_json"),
        "guided_regex": _text_guide("regex", payload.guided_regex),
        "guided_choice": _choice_guide(payload.guided_choice),
        "guided_grammar": _text_guide("grammar", payload.guided_grammar),
        "structured_outputs": None
        if payload.structured_outputs is None
        else _structured_guide(payload.structured_outputs),
    }
    return _single_guide(found)


def format_guide(response_format: wire.ResponseFormat) -> Guide | None:
    """Return the guide of a `response_format`; None for text."""
    match response_format.type:
        case "text":
            return None
        case "json_object":
            return Guide(kind="json_object")
        case "structural_tag":
            return Guide(kind="structural_tag", value=_ENCODE.encode(response_format).decode())
        case _:
            return named_schema(to_json_bytes(response_format.json_schema), "response_format.json_schema")


def named_schema(raw: bytes | None, name: str) -> Guide:
    """Return the guide of `{"name", "schema", ...}`, found at `name` in the body."""
    wrapper = _decode(raw, name, _NAMED) if raw is not None else _NamedSchema()
    guide = schema_guide(to_json_bytes(wrapper.schema), name)
    if guide is None:
        raise WrongType(f"'{name}.schema' is missing; send the schema of the answer.", param=name.partition(".")[0])
    return guide


def schema_guide(raw: bytes | None, name: str) -> Guide | None:
    """Return the guide of a JSON schema, sent as an object or as its text. The schema is kept as written."""
    if raw is None:
        return None
    schema = _decode(raw, name)
    if isinstance(schema, str):
        raw = schema.encode()
        schema = _decode(raw, name)
    if not isinstance(schema, dict):
        raise WrongType(f"the schema of '{name}' is not an object; send a JSON schema.", param=name.partition(".")[0])
    check_depth(schema, name.partition(".")[0])
    return Guide(kind="json_schema", value=raw.decode())


def _parse_stops(stops: str | list[str] | None) -> list[str]:
    """Return the stop texts, without empty ones. Those would end every answer at once, and clients send them for form
    fields that users left empty."""
    texts = [stops] if isinstance(stops, str) else stops or []
    return [text for text in texts if text]


def _parse_biases(raw: bytes | None) -> dict[int, float]:
    if raw is None:
        return {}
    biases: dict[str, float] = _decode(raw, "logit_bias", _BIASES)
    if len(biases) > MAX_BIASES:
        raise InvalidValue(f"'logit_bias' has more than {MAX_BIASES} tokens; send fewer.", param="logit_bias")
    for token, bias in biases.items():
        if not _ID.fullmatch(token):
            raise InvalidValue(
                f"'logit_bias' has the key {token[:64]!r}; its keys must be token ids.", param="logit_bias"
            )
        if not -100 <= bias <= 100:
            raise InvalidValue(
                f"'logit_bias' of {token} is {bias:g}; send a value from -100 to 100.", param="logit_bias"
            )
    return {int(token): bias for token, bias in biases.items()}


def _structured_guide(outputs: wire.StructuredOutputs) -> Guide | None:
    name = "structured_outputs"
    found = {
        f"{name}.json": schema_guide(to_json_bytes(outputs.json), name),
        f"{name}.regex": _text_guide("regex", outputs.regex),
        f"{name}.choice": _choice_guide(outputs.choice),
        f"{name}.grammar": _text_guide("grammar", outputs.grammar),
        f"{name}.json_object": Guide(kind="json_object") if outputs.json_object else None,
        f"{name}.structural_tag": _text_guide("structural_tag", outputs.structural_tag),
    }
    return _single_guide(found)


def _single_guide(found: dict[str, Guide | None]) -> Guide | None:
    if not any(found.values()):
        return None
    guides = {name: guide for name, guide in found.items() if guide is not None}
    if len(guides) > 1:
        one, other, *_ = guides
        raise InvalidValue(_TOO_MANY % (f"'{one}'", f"'{other}'"), param=other.partition(".")[0])
    for name, guide in guides.items():
        return msgspec.structs.replace(guide, field=name.partition(".")[0])
    return None


def _text_guide(kind: Any, value: str | None) -> Guide | None:
    return Guide(kind=kind, value=value) if value else None


def _choice_guide(texts: list[str] | None) -> Guide | None:
    return Guide(kind="choice", value=_ENCODE.encode(texts).decode()) if texts else None


def _decode(raw: bytes, name: str, decoder: msgspec.json.Decoder[Any] = _ANY) -> Any:
    check_pieces(raw, name.partition(".")[0])
    try:
        return decoder.decode(raw)
    except _DECODE_ERRORS as error:
        raise WrongType(f"'{name}': {to_request_error(error, raw).message}", param=name.partition(".")[0]) from None

"""Converts requests to tasks, and results to tensors. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
import numpy as np

from shoal.errors import EmptyInput, InvalidValue, Unsupported, WrongType
from shoal.http.fetching.inline import Link, parse_image
from shoal.http.images import ImageReader
from shoal.http.json.extras import check_pieces
from shoal.kserve import SPARSE_VALUES, codec
from shoal.surfaces.kserve import signature as names
from shoal.surfaces.kserve.padding import PAD_INDEX, count_rows, pad_rows
from shoal.surfaces.kserve.signature import Signature
from shoal.surfaces.kserve.tensors import InferRequest, Inputs, ParameterReader, Tensor
from shoal.surfaces.shared.sampling import to_guide, to_sampling
from shoal.surfaces.shared.truncation import parse_truncation
from shoal.surfaces.shared.wire_sampling import SamplingFields, StructuredOutputs
from shoal.types import (
    BatchTask,
    Classify,
    Embed,
    Embedded,
    Generate,
    Image,
    Rerank,
    Result,
    Sampling,
    Scored,
    TextItem,
    Usage,
    VectorKind,
)

EMBED_PARAMETERS = ("priority", "timeout", "truncate", "normalize", "dimensions", "prompt_name", "input_type")
SCORE_PARAMETERS = ("priority", "timeout", "truncate", "raw_scores")
_MAX_DIMENSIONS = 2**20
_INPUT_TYPES = {"query": "query", "passage": "document", "document": "document"}


class VllmSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON of `sampling_parameters`. `stream`, `lora_name` and `guided_decoding`, the former name of
    `structured_outputs`, are those of Triton's vLLM backend."""

    stream: bool | None = None
    lora_name: str | None = None
    guided_decoding: StructuredOutputs | None = None


_SAMPLING = msgspec.json.Decoder(VllmSampling, strict=False)  # the samples of that backend send numbers as texts
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_GUIDES = ("structured_outputs", "guided_decoding")
_ENCODE = msgspec.json.Encoder()


def build_batch_task(
    model: str,
    signature: Signature,
    call: InferRequest,
    parameters: ParameterReader,
    *,
    outputs: Collection[str],
    images: ImageReader,
) -> BatchTask:
    """Return the task of a request for these outputs to a model that embeds or scores. Raises RequestErrors that name
    the tensor or the parameter."""
    inputs = Inputs(signature, call.inputs)
    truncate, direction = parse_truncation(_check_truncate(parameters.read_either("truncate")))
    if signature.vectors:
        normalize = parameters.read_flag("normalize")
        task = Embed(
            model=model,
            inputs=_read_items(signature, inputs, images),
            prompt_name=parameters.read_text("prompt_name"),
            input_type=_parse_input_type(parameters.read_text("input_type")),
            truncate=truncate,
            truncation_direction=direction,
            normalize=normalize is not False,
            dimensions=parameters.read_integer("dimensions", 1, _MAX_DIMENSIONS),
            outputs=_select_vectors(signature, outputs),
        )
        _check_dense_options(task)
        parameters.finish(EMBED_PARAMETERS)
        return task
    raw_scores = bool(parameters.read_flag("raw_scores"))
    parameters.finish(SCORE_PARAMETERS)
    if names.QUERY in inputs:
        return Rerank(
            model=model,
            queries=inputs.read_texts(names.QUERY),
            documents=inputs.read_texts(names.DOCUMENT),
            raw_scores=raw_scores,
            truncate=truncate,
            truncation_direction=direction,
        )
    items = _read_items(signature, inputs, images)
    return Classify(
        model=model,
        inputs=items,  # type: ignore[arg-type]  # this model has no input for token ids
        raw_scores=raw_scores,
        truncate=truncate,
        truncation_direction=direction,
    )


def _select_vectors(signature: Signature, outputs: Collection[str]) -> tuple[VectorKind, ...]:
    """Return the kinds of vectors that the outputs are of; the default kind if they are of none."""
    found = [kind for kind in signature.vectors if any(each.name in outputs for each in names.VECTOR_OUTPUTS[kind])]
    return tuple(found) or signature.vectors[:1]


def _check_dense_options(task: Embed) -> None:
    """Raise Unsupported for options of dense vectors in a request for others, which come as the model makes them."""
    for name, is_sent in (("dimensions", task.dimensions is not None), ("normalize", not task.normalize)):
        if is_sent and "dense" not in task.outputs:
            raise Unsupported(
                f"the parameter {name!r} is of {names.EMBEDDINGS!r}: request that output, or leave it out", param=name
            )


def to_tensors(result: Result) -> list[Tensor]:
    """Return all outputs of a result of a model that embeds or scores. Raises TooManyInputs if they are too large."""
    return [*_to_vector_tensors(result)] if isinstance(result, Embedded) else [_to_scores(result)]


def _to_scores(result: Scored) -> Tensor:
    return Tensor(names.SCORES, "FP32", np.asarray(result.scores, np.float32))


def _to_vector_tensors(result: Embedded) -> Iterator[Tensor]:
    if result.vectors.shape[1]:
        yield Tensor(names.EMBEDDINGS, "FP32", result.vectors)
    yield Tensor(names.TOKEN_COUNT, "INT32", np.array(result.tokens, np.int32).reshape(-1, 1))
    if result.sparse:
        indices = [each.indices for each in result.sparse]
        yield Tensor(names.SPARSE_INDICES, "INT32", pad_rows(indices, PAD_INDEX))
        yield Tensor(SPARSE_VALUES, "FP32", pad_rows([each.values for each in result.sparse]))
        yield Tensor(names.SPARSE_LENGTHS, "INT32", count_rows(indices))
    if result.multi_vectors:
        yield Tensor(names.MULTI_VECTORS, "FP32", pad_rows(result.multi_vectors))
        yield Tensor(names.MULTI_LENGTHS, "INT32", count_rows(result.multi_vectors))
    if result.token_vectors:
        yield Tensor(names.TOKEN_EMBEDDINGS, "FP32", pad_rows(result.token_vectors))
        yield Tensor(names.TOKEN_LENGTHS, "INT32", count_rows(result.token_vectors))


def _read_items(signature: Signature, inputs: Inputs, images: ImageReader) -> list[TextItem | Image]:
    kinds = [name for name in (names.TEXT, names.IDS, names.IMAGE) if name in inputs]
    if len(kinds) != 1:
        possible = [each.name for each in signature.inputs if each.name != names.MASK]
        raise InvalidValue(
            f"send exactly one of the inputs {', '.join(possible)} (got {', '.join(kinds) or 'none'})", param="inputs"
        )
    if names.MASK in inputs and kinds[0] != names.IDS:
        raise InvalidValue(f"{names.MASK!r} belongs to {names.IDS!r}: leave it out", param=names.MASK)
    if kinds[0] == names.TEXT:
        return [*inputs.read_texts(names.TEXT)]
    if kinds[0] == names.IMAGE:
        files = inputs.read_bytes(names.IMAGE)
        if inputs.is_json(names.IMAGE):
            files = [_decode_image(each) for each in files]
        return [images.read_upload(each) for each in files]
    return _read_ids(inputs)


def _decode_image(data: bytes) -> bytes:
    """Return an image's file from JSON, which has no bytes: from its base64 or a data URI."""
    found = parse_image(data.decode())
    if isinstance(found, Link):
        raise InvalidValue("send the base64 of an image's file, or a data URI, instead of a URL", param=names.IMAGE)
    return found


def _read_ids(inputs: Inputs) -> list[TextItem | Image]:
    ids = inputs.read_matrix(names.IDS)
    if names.MASK not in inputs:
        return [*ids.tolist()]
    mask = inputs.read_matrix(names.MASK)
    if mask.shape != ids.shape:
        raise InvalidValue(
            f"{names.MASK!r} has the shape {list(mask.shape)}; send that of {names.IDS!r}, {list(ids.shape)}",
            param=names.MASK,
        )
    rows: list[TextItem | Image] = [row[keep].tolist() for row, keep in zip(ids, mask != 0, strict=True)]
    if not all(rows):
        raise EmptyInput(f"{names.MASK!r} has a row without tokens; leave that row out", param=names.MASK)
    return rows


def _check_truncate(value: bool | str | None) -> bool | str | None:
    """Check a flag or one of NIM's words."""
    if isinstance(value, str) and value not in ("NONE", "START", "END"):
        raise InvalidValue("the parameter 'truncate' must be true, false, NONE, START or END", param="truncate")
    return value


def _parse_input_type(value: str | None) -> str | None:
    if value is not None and value not in _INPUT_TYPES:
        raise InvalidValue(f"the parameter 'input_type' must be one of {', '.join(_INPUT_TYPES)}", param="input_type")
    return None if value is None else _INPUT_TYPES[value]


class Generation(msgspec.Struct, kw_only=True):
    """A generation task with the form of its responses: whether they are sent piece by piece, `prefix` before the
    answer, and which outputs they have."""

    task: Generate
    prefix: str = ""
    outputs: set[str] = set()


def build_generation(
    model: str,
    adapter: str,
    signature: Signature,
    call: InferRequest,
    parameters: ParameterReader,
    *,
    outputs: Collection[str],
    stream: bool,
) -> Generation:
    """Return the task of a request for these outputs to a language model, read as Triton's vLLM backend does.

    `stream`: the default if the request does not say. Sampling fields come in the JSON of `sampling_parameters`, else
    as parameters of the request. Raises RequestErrors that name the tensor or the field.
    """
    inputs = Inputs(signature, call.inputs)
    fields = _read_sampling(inputs, parameters)
    flag = inputs.read_flag(names.STREAM)
    wants_stream = next((each for each in (flag, fields.stream) if each is not None), stream)
    exclude = inputs.read_flag(names.EXCLUDE)
    if exclude is False and wants_stream:
        raise InvalidValue(f"{names.EXCLUDE!r} cannot be false in a stream; leave it out", param=names.EXCLUDE)
    prompt = inputs.read_text(names.PROMPT) or ""
    task = Generate(
        model=model,
        prompts=[prompt],
        n=fields.n or 1,
        sampling=_to_sampling(fields),
        stream=wants_stream,
        adapter=adapter or fields.lora_name or "",
    )
    if wants_stream and task.n > 1:
        raise Unsupported("a stream has one answer: leave out 'n', or set 'stream' to false", param="n")
    return Generation(
        task=task,
        prefix="" if exclude or wants_stream else prompt,
        outputs=_select_generated(outputs, inputs),
    )


def _read_sampling(inputs: Inputs, parameters: ParameterReader) -> VllmSampling:
    text = inputs.read_text(names.SAMPLING)
    left = parameters.take_all() if text is None else {}
    parameters.finish(("priority", "timeout"))
    where, raw = ("parameters", _ENCODE.encode(left)) if text is None else (names.SAMPLING, text.encode())
    check_pieces(raw, where)
    try:
        fields = _SAMPLING.decode(_unwrap_guides(raw))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WrongType(f"{where!r} is invalid: {error}", param=where) from None
    fields.structured_outputs = fields.structured_outputs or fields.guided_decoding
    return fields


def _unwrap_guides(raw: bytes) -> bytes:
    """Return the JSON of sampling fields with guides as objects: Triton's vLLM backend reads them as JSON in a text."""
    if not any(name.encode() in raw for name in _GUIDES):
        return raw
    fields = _FIELDS.decode(raw)
    for name in _GUIDES:
        value = fields.get(name)
        if value is not None and bytes(value).startswith(b'"'):
            fields[name] = msgspec.Raw(msgspec.json.decode(value, type=str).encode())
    return _ENCODE.encode(fields)


def _to_sampling(fields: VllmSampling) -> Sampling:
    return to_sampling(fields, max_tokens=fields.max_tokens, logprobs=None, guide=to_guide(fields))


def _select_generated(listed: Collection[str], inputs: Inputs) -> set[str]:
    """Return the outputs: those listed, and those that an input requests."""
    flags = {
        names.REASON: names.WANTS_REASON,
        names.PROMPT_TOKENS: names.WANTS_PROMPT_TOKENS,
        names.TOKENS: names.WANTS_TOKENS,
    }
    return {*listed, *(output for output, flag in flags.items() if inputs.read_flag(flag))}


def answer_tensors(generation: Generation, texts: list[str], reasons: list[str], usage: Usage | None) -> list[Tensor]:
    """Return the requested outputs of a response with one text for each answer.

    Clients add up the generated tokens of all responses, and take the prompt's tokens from the first that has them:
    without a usage, which the last one has, the former are 0 and the latter are absent.
    """
    made = [
        Tensor(names.ANSWER, "BYTES", codec.to_objects([generation.prefix + text for text in texts], (len(texts),))),
        Tensor(names.REASON, "BYTES", codec.to_objects(reasons, (len(reasons),))),
    ]
    if usage is not None:
        made.append(Tensor(names.PROMPT_TOKENS, "UINT32", np.array([usage.prompt_tokens], np.uint32)))
    generated = 0 if usage is None else usage.completion_tokens
    made.append(Tensor(names.TOKENS, "UINT32", np.array([generated], np.uint32)))
    return [each for each in made if each.name in generation.outputs]

"""Parse inputs that are texts, token ids or images, in all forms that clients send."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from shoal.core.input_errors import parse_input_index
from shoal.errors import EmptyInput, InvalidValue, RequestError, TooManyInputs, WrongType
from shoal.http.fetching.headers import FIELD, MAX_CHARACTERS
from shoal.http.images import ImageReader
from shoal.http.json.refused import UnreadField, is_set
from shoal.surfaces.shared.wire_inputs import ImageLink, InputMessage, InputObject, Modalities
from shoal.types import Image, TextItem

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.http.request import Request

_HEADERS = msgspec.json.Decoder(dict[str, str])
_MAX_HEADER_BYTES: Final = 8 * MAX_CHARACTERS
_TEXT_TYPES = ("text", "input_text")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image that is not read yet: `link` as the client sent it, and `place`, its field in the request."""

    link: str
    place: str


Input: TypeAlias = TextItem | ImageReference


def parse_inputs(inputs: str | list[Any], limit: int, modality: Modalities | None = None) -> list[Input]:
    """Parse an `input` field into its inputs, in order. One bare list of ids is one input.

    `modality` says whether plain strings are texts or images.

    Raises WrongType, EmptyInput, TooManyInputs, InvalidValue.
    """
    if isinstance(inputs, str):
        if inputs and modality is None:
            return [inputs]
        inputs = [inputs]
    if not inputs:
        raise EmptyInput("'input' is an empty list; send at least one text.", param="input")
    kinds = set(map(type, inputs))
    if kinds == {int}:
        inputs = [inputs]
    elif int in kinds:
        raise _mixed_error()
    check_count(inputs, "input", limit)
    if modality is not None:
        inputs = _apply_modality(inputs, modality)
    if InputObject in kinds:
        inputs = [
            parse_part(each, f"input[{at}]") if isinstance(each, InputObject) else each
            for at, each in enumerate(inputs)
        ]
    if len(set(map(type, inputs)) - {ImageReference}) > 1:
        raise _mixed_error()
    if not all(inputs):
        at = next(at for at, each in enumerate(inputs) if not each)
        raise EmptyInput(f"'input[{at}]' is empty; omit it or send a text.", param="input")
    return cast(list[Input], inputs)


def parse_texts(inputs: str | list[Any], limit: int) -> list[TextItem]:
    """Parse an `input` field that cannot hold objects, as `parse_inputs` does."""
    return cast(list[TextItem], parse_inputs(inputs, limit))


def parse_messages(messages: Sequence[InputMessage]) -> list[Input]:
    """Parse a conversation with one text or one image into one input, as vLLM does.

    Raises WrongType, InvalidValue and EmptyInput.
    """
    found: list[Input] = []
    for at, message in enumerate(messages):
        if isinstance(message.content, str):
            found.append(message.content)
            continue
        parts = enumerate(message.content[:2])  # two are enough to refuse the request below
        found += [parse_part(each, f"messages[{at}].content[{place}]") for place, each in parts]
        if len(found) > 1:
            break
    if len(found) != 1:
        count = "no" if not found else "more than one"
        raise InvalidValue(
            f"'messages' has {count} text or image: send one, since 'messages' is a single input and no model here "
            "combines several. Use 'input' for many.",
            param="messages",
        )
    if not found[0]:
        raise EmptyInput("'messages' contains an empty text; send a text or an image.", param="messages")
    return found


def parse_part(part: InputObject, place: str) -> str | ImageReference:
    """Parse an object into its text or image. `place` is its field in the request.

    Raises WrongType and InvalidValue.
    """
    field = place.partition("[")[0]
    links = [(name, link) for name in ("image", "image_url") if (link := getattr(part, name)) is not None]
    if not links and part.text is None:
        raise WrongType(f"'{place}' has no 'text' and no 'image'; send an object with one of them.", param=field)
    if len(links) + (part.text is not None) > 1:
        raise InvalidValue(
            f"'{place}' has several of 'text', 'image' and 'image_url'; send one of them, since no model here combines "
            "them into one vector.",
            param=field,
        )
    if part.type is not None and (part.type in _TEXT_TYPES) != (part.text is not None):
        raise WrongType(f"'{place}' is of type {part.type} but contains something else.", param=field)
    if part.text is not None:
        return part.text
    ((name, link),) = links
    return to_image_reference(link, f"{place}.{name}")


def to_image_reference(link: str | ImageLink, place: str) -> ImageReference:
    return ImageReference(link, place) if isinstance(link, str) else ImageReference(link.url, f"{place}.url")


def check_count(entries: Sequence[Any], field: str, limit: int) -> None:
    """Raise TooManyInputs if a field holds more than `limit` entries."""
    if len(entries) > limit:
        raise TooManyInputs(f"'{field}' has more than {limit} entries; split the request.", param=field)


def has_images(inputs: Sequence[Input]) -> bool:
    return ImageReference in set(map(type, inputs))


def check_modalities(gateway: Gateway, model: str, inputs: Sequence[Input]) -> None:
    """Check that the model accepts images, before anything is fetched.

    Raises InvalidValue if there is an image and the model accepts none, or accepts only images and there are other
    inputs.
    """
    if not has_images(inputs):
        return
    gateway.check_modality(model, "image")
    if not all(isinstance(each, ImageReference) for each in inputs):
        gateway.check_modality(model, "text")


async def read_images(
    image_reader: ImageReader, inputs: Sequence[Input], request: Request, headers: UnreadField = msgspec.UNSET
) -> list[TextItem | Image]:
    """Read the images among the inputs and return all inputs, in order. `headers` are the client's, unparsed.

    Raises what `ImageReader.read` raises; errors name the field as the client sent it.
    """
    sought = [each for each in inputs if isinstance(each, ImageReference)]
    links = [each.link for each in sought]
    try:
        parsed = parse_headers(headers)
        found = iter(await image_reader.read(links, deadline=request.deadline, headers=parsed, client=request.client))
    except RequestError as error:
        raise _remap_error(error, sought) from None
    return [next(found) if isinstance(each, ImageReference) else each for each in inputs]


def parse_headers(raw: UnreadField) -> Mapping[str, str]:
    """Parse the headers for fetching images.

    Raises WrongType unless they are an object of strings, and InvalidValue if they are too long.
    """
    if not is_set(raw):
        return {}
    data = memoryview(cast(msgspec.Raw, raw))
    if len(data) > _MAX_HEADER_BYTES:
        raise InvalidValue(f"{FIELD} can have at most {MAX_CHARACTERS} characters in total: send fewer", param=FIELD)
    try:
        return _HEADERS.decode(data)
    except msgspec.ValidationError:
        raise WrongType(f"'{FIELD}' is invalid: it must map header names to strings.", param=FIELD) from None


def count_text_tokens(inputs: Sequence[TextItem | Image], tokens: Sequence[int]) -> int:
    """Counts the tokens of the texts; images have none."""
    return sum(count for each, count in zip(inputs, tokens, strict=True) if not isinstance(each, Image))


def _apply_modality(inputs: list[Any], modality: Modalities) -> list[Any]:
    """Turn plain strings into images where `modality` says so; objects carry their own type."""
    kinds = modality if isinstance(modality, list) else [modality] * len(inputs)
    if len(kinds) != len(inputs):
        raise InvalidValue(
            f"'modality' has {len(kinds)} entries for {len(inputs)} inputs: send one for each input, or one for all.",
            param="modality",
        )
    if any(kind == "image" and isinstance(each, list) for each, kind in zip(inputs, kinds, strict=True)):
        raise WrongType("'input' has token ids, but its 'modality' is image: send images.", param="input")
    return [
        ImageReference(each, f"input[{at}]") if kind == "image" and isinstance(each, str) else each
        for at, (each, kind) in enumerate(zip(inputs, kinds, strict=True))
    ]


def _mixed_error() -> WrongType:
    return WrongType("'input' mixes texts and token ids; send one kind per request.", param="input")


def _remap_error(error: RequestError, sought: Sequence[ImageReference]) -> RequestError:
    """Rewrite an image's error to name the field as the client sent it. With several images, the error holds the
    index."""
    if error.param is not None:
        return error
    at, message = parse_input_index(error)
    if at is None and len(sought) > 1:
        return error
    place = sought[at or 0].place
    return type(error)(f"'{place}': {message}", param=re.split(r"[.\[]", place)[0])

"""Read the images of an `infer` request: URLs, data URIs or base64, and uploaded files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.core.input_errors import parse_input_index
from shoal.errors import EmptyInput, InvalidValue, RequestError, TooManyInputs
from shoal.http.images import ImageReader
from shoal.http.request import Request
from shoal.types import Image


def check_count(sources: Sequence[str | bytes], limit: int) -> None:
    """Raise EmptyInput for no images, or TooManyInputs for more than `limit`."""
    if not sources:
        raise EmptyInput("`image` is an empty list; send at least one image.", param="image")
    if len(sources) > limit:
        raise TooManyInputs(f"`image` has more than {limit} images; split the request.", param="image")


async def read_images(
    image_reader: ImageReader, sources: Sequence[str | bytes], request: Request, headers: Mapping[str, str]
) -> list[Image]:
    """Read all images, in the order of the request.

    Raises what `ImageReader.read` raises. The error of an invalid image begins with the original's message, and gives
    the image's index among all images.
    """
    places = [place for place, each in enumerate(sources) if isinstance(each, str)]
    try:
        uploaded = [_read_upload(image_reader, each, place, len(sources)) for place, each in enumerate(sources)]
        texts = [each for each in sources if isinstance(each, str)]
        try:
            found = iter(
                await image_reader.read(texts, deadline=request.deadline, headers=headers, client=request.client)
            )
        except RequestError as error:
            raise _renumber(error, places, len(sources)) from None
    except (InvalidValue, EmptyInput) as error:
        raise _to_image_error(error) from None
    return [next(found) if each is None else each for each in uploaded]


def _read_upload(image_reader: ImageReader, source: str | bytes, place: int, count: int) -> Image | None:
    if isinstance(source, str):
        return None
    try:
        return image_reader.read_upload(source)
    except InvalidValue as error:
        raise (error.at_input(place) if count > 1 else error) from None


def _renumber(error: RequestError, places: Sequence[int], count: int) -> RequestError:
    """Map an error's index among the texts to the index among all images. Return other errors unchanged."""
    if len(places) == count or not isinstance(error, InvalidValue | EmptyInput) or error.param is not None:
        return error
    place, message = parse_input_index(error)
    return error.with_message(message).at_input(places[place or 0])


def _to_image_error(error: InvalidValue | EmptyInput) -> InvalidValue | EmptyInput:
    """Prefix an image's error with the original's message. Errors with a parameter are not about an image."""
    return error if error.param is not None else type(error)(f"Invalid image. {error.message}", param="image")

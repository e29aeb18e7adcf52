"""`shoal embed`: convert texts and images to vectors, in this process or on a running server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from shoal.cli._asking import ServerClient, first_key
from shoal.cli._completion import complete_model
from shoal.cli._local import run_model
from shoal.cli._options import with_settings
from shoal.config import LoadedConfig
from shoal.errors import ConfigError, SetupError, TransportFailed

if TYPE_CHECKING:
    from shoal.cli._images import Input
    from shoal.python.api import Shoal
    from shoal.types import Image, Vectors

# Enough for full batches on every stream, yet below any server's limit.
_CHUNK = 512
# Limits for image files. One chunk plus one more file, as base64, must fit a server's maximum request.
_REMOTE_CHUNK_BYTES = 4 * 2**20
_LOCAL_CHUNK_BYTES = 64 * 2**20

_RequestFields: TypeAlias = dict[str, Any]
"""The request fields that were set, by their names on the wire."""


@with_settings("Engine", "Model files")
def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="Non-empty texts; without texts and images, UTF-8 lines from standard input.",
        ),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            metavar="FILE...",
            help="Image files, up to the next flag or --; - is standard input.",
        ),
    ] = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Model, as for serve; with --url, its name on the server (default: the first one).",
            autocompletion=complete_model,
        ),
    ] = "",
    url: Annotated[str, typer.Option(help="Use this server instead of loading the model locally.")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Output file: .npy or .json.")
    ] = None,
    input_type: Annotated[str, typer.Option(metavar="ROLE", help="Role of the texts: query or document.")] = "",
    prompt_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the model's prompt to prepend to the texts.")
    ] = "",
    dimensions: Annotated[int | None, typer.Option(min=1, metavar="N", help="Truncate vectors to this length.")] = None,
    loaded: LoadedConfig,
) -> None:
    """Embed texts and images; prints a JSON array of the vectors, texts first, then images.

    An empty line is an error: it has no vector, so rows would not match lines. Images are read locally and sent as
    bytes, also to a server: shoal embed "a dog" --image *.jpg
    """
    if output is not None and output.suffix not in (".npy", ".json"):
        raise ConfigError(f"--output {output}: name a .npy or a .json file", param="--output")
    all_inputs = _collect_inputs(texts or [], images or [])
    wishes = {"input_type": input_type or None, "prompt_name": prompt_name or None, "dimensions": dimensions}
    wishes = {name: value for name, value in wishes.items() if value is not None}
    if url:
        server = ServerClient(url, first_key(*loaded.settings.api_key))
        vectors = _embed_remote(server, all_inputs, {"model": model or server.first_model("embed"), **wishes})
    else:
        with run_model(loaded, model) as models:
            vectors = _embed_local(models, all_inputs, wishes)
    _write(vectors, output)


class _Inputs(NamedTuple):
    """All inputs. `names` holds the file names of images and "" for texts."""

    items: Sequence[Input]
    names: Sequence[str]

    def chunks(self, max_bytes: int) -> Iterator[tuple[list[str | Image], Sequence[str]]]:
        """Yield chunks of at most _CHUNK inputs. A chunk ends with the image that brings it to `max_bytes` bytes."""
        from shoal.cli._images import read_image

        start, size = 0, 0
        items: list[str | Image] = []
        for place, each in enumerate(self.items, 1):
            items.append(item := read_image(each))
            size += 0 if isinstance(item, str) else len(item.data)
            if len(items) == _CHUNK or size >= max_bytes or place == len(self.items):
                yield items, self.names[start:place]
                start, size, items = place, 0, []


def _collect_inputs(texts: list[str], images: list[str]) -> _Inputs:
    lines = check_texts(texts) if texts or images else _read_lines()
    if not images:
        return _Inputs(lines, [""] * len(lines))
    from shoal.cli._images import check_images

    return _Inputs([*lines, *check_images(images)], [*[""] * len(lines), *images])


def _read_lines() -> list[str]:
    """Read texts from standard input, one a line. Only LF and CRLF end a line; a text may contain any other break."""
    if sys.stdin.isatty():
        raise ConfigError("give texts as arguments, or pipe them in, one a line", param="--")
    lines = sys.stdin.buffer.read().split(b"\n")
    if not lines[-1]:
        lines.pop()  # a trailing line end starts no further line
    if not lines:
        raise SetupError("standard input is empty: give texts as arguments, or pipe them in, one a line")
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            text = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            reason = f"byte {error.start + 1} is {line[error.start]:#04x}"
            raise SetupError(f"line {number} of standard input is not UTF-8 ({reason}): convert it first") from None
        if not text:
            raise SetupError(f"line {number} of standard input is empty and has no vector: remove it or fill it")
        texts.append(text)
    return texts


def check_texts(texts: list[str]) -> list[str]:
    for number, text in enumerate(texts, 1):
        if not text:
            raise ConfigError(f"text {number} is empty and has no vector: remove it or fill it", param="--")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"text {number} is not UTF-8: convert it first", param="--") from None
    return texts


def _embed_local(models: Shoal, all_inputs: _Inputs, wishes: _RequestFields) -> Vectors:
    import numpy as np

    from shoal.cli._images import name_in_errors

    parts = []
    for items, names in all_inputs.chunks(_LOCAL_CHUNK_BYTES):
        with name_in_errors(names):
            parts.append(models.embed(items, **wishes))
    return np.concatenate(parts)


def _embed_remote(server: ServerClient, all_inputs: _Inputs, wishes: _RequestFields) -> Vectors:
    import numpy as np

    from shoal.cli._images import name_in_errors

    rows: list[Vectors] = []
    for items, names in all_inputs.chunks(_REMOTE_CHUNK_BYTES):
        inputs = [*map(_to_input, items)] if any(names) else items
        with name_in_errors(names):
            reply = server.ask("/v1/embeddings", {"input": inputs, "encoding_format": "base64", **wishes})
        try:
            rows += [_decode_vectors(entry["embedding"]) for entry in reply["data"]]
        except (LookupError, TypeError, ValueError):
            raise TransportFailed("the server does not respond like OpenAI's API: is it a Shoal server?") from None
    return np.stack(rows)


def _to_input(item: str | Image) -> dict[str, str]:
    """Convert an input to the form that a server accepts in mixed lists of texts and images."""
    from shoal.cli._images import to_data_uri

    return {"text": item} if isinstance(item, str) else {"image": to_data_uri(item)}


def _decode_vectors(text: str) -> Vectors:
    import numpy as np
    import pybase64

    return np.frombuffer(pybase64.b64decode(text), dtype="<f4")


def _write(vectors: Vectors, output: Path | None) -> None:
    import numpy as np
    import orjson

    try:
        if output is not None and output.suffix == ".npy":
            np.save(output, vectors, allow_pickle=False)
            return
        text = orjson.dumps(np.ascontiguousarray(vectors), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        if output is None:
            sys.stdout.buffer.write(text)
        else:
            output.write_bytes(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SetupError(f"{output or 'the output'} cannot be written: {error.strerror}") from None

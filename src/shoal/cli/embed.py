"""`shoal embed`: texts to vectors, in this process or by a running server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from shoal.cli._options import with_settings
from shoal.config import Loaded
from shoal.errors import ConfigError, SetupError, TransportFailed

if TYPE_CHECKING:
    from shoal.app import App
    from shoal.types import Vectors

# Enough for full batches on every stream, and small enough that a server's limits never matter.
_CHUNK = 512
# Nobody waits behind this queue: only a hang should end it.
_PATIENCE_S = 3600.0

_Wishes: TypeAlias = dict[str, Any]
"""The fields of the request that were given, by their names on the wire."""


@with_settings("Engine", "Model files")
def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="Texts, none of them empty; none at all reads UTF-8 from standard input, one text a line.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Model, as for serve; with --url its name there (else the first).")
    ] = "",
    url: Annotated[str, typer.Option(help="Ask this server instead of loading the model here.")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there: .npy or .json.")
    ] = None,
    input_type: Annotated[str, typer.Option(metavar="ROLE", help="query or document.")] = "",
    prompt_name: Annotated[str, typer.Option(metavar="NAME", help="Prompt of the model to put before the texts.")] = "",
    dimensions: Annotated[int | None, typer.Option(min=1, metavar="N", help="Shorten the vectors to this.")] = None,
    *,
    loaded: Loaded,
) -> None:
    """Turn texts into vectors; prints a JSON array with one vector a text, in their order.

    An empty line stops it before it begins: it has no vector, and without one the rows would not be those of the lines.
    """
    if output is not None and output.suffix not in (".npy", ".json"):
        raise ConfigError(f"--output {output}: name a .npy or a .json file", param="--output")
    given = _checked(texts) if texts else _lines()
    wishes = {"input_type": input_type or None, "prompt_name": prompt_name or None, "dimensions": dimensions}
    wishes = {name: value for name, value in wishes.items() if value is not None}
    if url:
        keys = [entry.partition(" ")[0] for entry in loaded.settings.api_key]  # without their classes
        server = _Server(url.rstrip("/"), keys[0] if keys else None)
        vectors = _remote(server, given, {"model": model or server.first_model(), **wishes})
    else:
        from shoal.app import open_app
        from shoal.cli.progress import TerminalProgress

        with TerminalProgress() as progress:
            opening = open_app(loaded, (model,) if model else loaded.served[:1], progress)
            vectors = asyncio.run(_local(opening, given, wishes))
    _write(vectors, output)


def _lines() -> list[str]:
    """Line ends are LF and CR LF alone: a text may hold every other kind of break."""
    if sys.stdin.isatty():
        raise ConfigError("give texts as arguments, or pipe them in, one a line", param="--")
    lines = sys.stdin.buffer.read().split(b"\n")
    if not lines[-1]:
        lines.pop()  # what ends with a line end has no line after it
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
            raise SetupError(f"line {number} of standard input is empty and has no vector: take it out, or fill it")
        texts.append(text)
    return texts


def _checked(texts: list[str]) -> list[str]:
    for number, text in enumerate(texts, 1):
        if not text:
            raise ConfigError(f"text {number} is empty and has no vector: leave it out, or fill it", param="--")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"text {number} is not UTF-8: convert it first", param="--") from None
    return texts


async def _local(opening: AbstractAsyncContextManager[App], texts: Sequence[str], wishes: _Wishes) -> Vectors:
    import numpy as np

    from shoal.types import Context, Embed

    async with opening as app:
        await app.wait_loaded()
        failed = [card for card in app.gateway.models() if card.state == "failed"]
        if failed:
            raise SetupError(f"{failed[0].name}: {failed[0].error}")
        parts = []
        for chunk in _chunks(texts):
            ctx = Context(id="embed", deadline=time.monotonic() + _PATIENCE_S)
            parts.append((await app.gateway.run(Embed(model="", inputs=[*chunk], **wishes), ctx)).vectors)
        return np.concatenate(parts)


def _remote(server: _Server, texts: Sequence[str], wishes: _Wishes) -> Vectors:
    import numpy as np

    rows: list[Vectors] = []
    for chunk in _chunks(texts):
        reply = server.ask("/v1/embeddings", {"input": chunk, "encoding_format": "base64", **wishes})
        rows += [_decoded(entry["embedding"]) for entry in reply["data"]]
    return np.stack(rows)


class _Server:
    """A server that speaks as OpenAI's does."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def first_model(self) -> str:
        """The first one that it lists. Raises SetupError when it lists none, and what `ask` raises."""
        try:
            return str(self.ask("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError):
            raise SetupError(f"{self._url} lists no model: name one with --model") from None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST `body`, or GET. Raises TransportFailed when nothing answers as such a server would, SetupError when it
        refuses."""
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        url = self._url + path
        try:
            request = Request(url, None if body is None else json.dumps(body).encode(), self._headers)
            with urlopen(request, timeout=_PATIENCE_S) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except HTTPError as error:
            with error:
                raise SetupError(f"{url} answered {error.code}: {_reason(error.read())}") from None
        except (OSError, ValueError) as error:
            raise TransportFailed(f"{url} does not answer ({error}): is `shoal serve` running there?") from None


def _reason(body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body[:200].decode(errors="replace")


def _decoded(text: str) -> Vectors:
    import numpy as np
    import pybase64

    return np.frombuffer(pybase64.b64decode(text), dtype="<f4")


def _chunks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    return (texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK))


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
        raise SetupError(f"{output} cannot be written: {error.strerror}") from None

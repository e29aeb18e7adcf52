"""`shoal rank`: rank texts by how well they describe an image, in this process or on a running server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from shoal.cli._asking import REQUEST_TIMEOUT_S, ServerClient, first_key
from shoal.cli._options import with_settings
from shoal.config import LoadedConfig
from shoal.errors import SetupError, TransportFailed, Unsupported

if TYPE_CHECKING:
    from shoal.app import App
    from shoal.types import Image


class _Row(NamedTuple):
    place: int
    text: str
    cosine: float
    score: float


@with_settings("Engine", "Model files")
def rank(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="File of a picture; - is standard input.")],
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Texts to compare it with, none of them empty.")],
    model: Annotated[
        str, typer.Option(metavar="ADDRESS", help="A model of pictures and texts; with --url its name there.")
    ] = "",
    url: Annotated[str, typer.Option(help="Ask this server instead of loading the model here.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    loaded: LoadedConfig,
) -> None:
    """Say which of the texts describes a picture best.

    The score is the model's own: of CLIP a probability, so that those of all texts sum to 1; of SigLIP each stands
    alone. The cosine is that of the vectors.
    """
    from shoal.cli._pictures import check_images, name_in_errors, read_image
    from shoal.cli.embed import check_texts

    wanted = check_texts(texts)
    (found,) = check_images([image])
    picture = read_image(found)
    assert not isinstance(picture, str)
    with name_in_errors([image]):
        if url:
            rows = _rank_remote(ServerClient(url, first_key(*loaded.settings.api_key)), picture, wanted, model)
        else:
            from shoal.app import open_app
            from shoal.cli.progress import TerminalProgress

            with TerminalProgress() as progress:
                opening = open_app(loaded, (model,) if model else loaded.served[:1], progress)
                rows = asyncio.run(_rank_local(opening, picture, wanted))
    _show(sorted(rows, key=lambda row: (-row.score, -row.cosine, row.place)), as_json=as_json)


async def _rank_local(opening: AbstractAsyncContextManager[App], picture: Image, texts: Sequence[str]) -> list[_Row]:
    from shoal.core.image_text_scoring import score_image_texts
    from shoal.types import Context

    async with opening as app:
        await app.wait_until_loaded()
        gateway = app.gateway
        name = gateway.resolve("", "embed")[0]
        card = gateway.model(name)
        if card.state == "failed":
            raise SetupError(f"{name}: {card.error}")
        gateway.check_modality(name, "image")
        if card.facts is None or card.facts.contrast is None:
            raise Unsupported(f"the model {name!r} does not compare pictures with texts: name a CLIP or SigLIP model")
        ctx = Context(id="rank", deadline=time.monotonic() + REQUEST_TIMEOUT_S)
        found = await score_image_texts(gateway.run, name, [picture], texts, ctx, card.facts.contrast)
    pairs = zip(texts, found.cosine[0].tolist(), found.scores[0].tolist(), strict=True)
    return [_Row(index, *each) for index, each in enumerate(pairs)]


def _rank_remote(server: ServerClient, picture: Image, texts: Sequence[str], model: str) -> list[_Row]:
    from shoal.cli._pictures import to_data_uri

    body = {"image": to_data_uri(picture), "texts": texts} | ({"model": model} if model else {})
    reply = server.ask("/rank", body)
    try:
        return [
            _Row(int(each["index"]), str(each["text"]), float(each["cosine"]), float(each["score"]))
            for each in reply["results"]
        ]
    except (LookupError, TypeError, ValueError):
        raise TransportFailed("the server answers /rank otherwise than Shoal does: is that a Shoal server?") from None


def _facts(row: _Row) -> dict[str, Any]:
    return {"index": row.place, "text": row.text, "cosine": row.cosine, "score": row.score}


def _show(rows: Sequence[_Row], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_facts(row) for row in rows], indent=2, ensure_ascii=False))
        return
    from shoal.cli._tables import print_table

    print_table(("SCORE", "COSINE", "TEXT"), ((f"{row.score:.4f}", f"{row.cosine:.4f}", row.text) for row in rows))

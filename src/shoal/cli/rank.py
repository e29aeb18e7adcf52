"""`shoal rank`: rank texts by how well they describe an image, in this process or on a running server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli._asking import ServerClient, first_key
from shoal.cli._completion import complete_model
from shoal.cli._local import run_model
from shoal.cli._options import with_settings
from shoal.config import LoadedConfig
from shoal.errors import TransportFailed

if TYPE_CHECKING:
    from shoal.python.results import Match
    from shoal.types import Image


@with_settings("Engine", "Model files")
def rank(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Image file; - is standard input.")],
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Non-empty texts to compare with the image.")],
    model: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Image-text model; with --url, its name on the server.",
            autocompletion=complete_model,
        ),
    ] = "",
    url: Annotated[str, typer.Option(help="Use this server instead of loading the model locally.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    loaded: LoadedConfig,
) -> None:
    """Rank texts by how well they describe an image.

    The score is the model's own: of CLIP a probability, so that those of all texts sum to 1; of SigLIP each stands
    alone. The cosine is that of the vectors.
    """
    from shoal.cli._images import check_images, name_in_errors, read_image
    from shoal.cli.embed import check_texts

    checked_texts = check_texts(texts)
    (found,) = check_images([image])
    content = read_image(found)
    assert not isinstance(content, str)
    with name_in_errors([image]):
        if url:
            matches = _rank_remote(
                ServerClient(url, first_key(*loaded.settings.api_key)), content, checked_texts, model
            )
        else:
            with run_model(loaded, model) as models:
                matches = models.rank(content, checked_texts)
    _show(sorted(matches, key=lambda match: (-match.score, -match.cosine, match.index)), as_json=as_json)


def _rank_remote(server: ServerClient, image: Image, texts: Sequence[str], model: str) -> list[Match]:
    from shoal.cli._images import to_data_uri
    from shoal.python.results import Match

    body = {"image": to_data_uri(image), "texts": texts} | ({"model": model} if model else {})
    reply = server.ask("/rank", body)
    try:
        return [
            Match(int(each["index"]), str(each["text"]), float(each["cosine"]), float(each["score"]))
            for each in reply["results"]
        ]
    except (LookupError, TypeError, ValueError):
        raise TransportFailed("the server does not answer /rank like Shoal: is it a Shoal server?") from None


def _show(matches: Sequence[Match], *, as_json: bool) -> None:
    from shoal.cli._tables import print_json, print_table

    if as_json:
        print_json([asdict(match) for match in matches], ascii_only=False)
        return

    rows = ((f"{match.score:.4f}", f"{match.cosine:.4f}", match.text) for match in matches)
    print_table(("SCORE", "COSINE", "TEXT"), rows)

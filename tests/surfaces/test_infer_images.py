"""Images on the inference server's routes: alone, in lists, and with texts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.core.protocols import Observer
from shoal.errors import InvalidValue, Overloaded
from shoal.http.fetching.fetcher import Fetcher
from shoal.surfaces import ImageReader
from shoal.types import Context, Embed, Embedded, Image, Result
from tests.surfaces.family_kit import CLIP, EMBEDDER, RERANKER, family
from tests.surfaces.image_form_kit import BLUE, RED, close, inline, wanted
from tests.surfaces.surface_kit import MODEL, RecordingRunner, serve
from tests.unit.http.fetching.kit import fetcher, http, url, web

PATHS = [("/infer_image", "embedding"), ("/embed_image", "embeddings")]


@pytest.mark.parametrize(("path", "key"), PATHS)
async def test_one_image_or_many(path: str, key: str) -> None:
    """Lists keep their order; the answer is always two-dimensional, with the time in milliseconds."""
    async with family(CLIP) as server:
        for image, files in ((inline(RED), [RED]), ([inline(BLUE), inline(RED)], [BLUE, RED])):
            answer = await server.call("POST", path, {"model_name": CLIP, "image": image})
            assert answer.status == 200, answer.body
            assert list(answer.json()) == [key, "processingTimeMs"]
            close(answer.json()[key], [wanted(file) for file in files])
            assert isinstance(answer.json()["processingTimeMs"], float)
            assert int(answer.headers["x-shoal-batch-size"]) >= 1


async def test_texts_at_the_newer_path() -> None:
    """/embed_text answers like the original's later versions."""
    async with family(CLIP) as server:
        answer = await server.call("POST", "/embed_text", {"name": CLIP, "text": "a cat"})
        assert list(answer.json()) == ["embeddings", "processingTimeMs"]
        close(answer.json()["embeddings"], [wanted("a cat")])


async def test_both_sides() -> None:
    """Each side has its own vectors; the headers cover both."""
    async with family(CLIP) as server:
        body = {"model_name": CLIP, "text": ["a cat", "two dogs"], "image": [inline(RED), inline(BLUE), inline(RED)]}
        answer = await server.call("POST", "/infer", body)
        assert list(answer.json()) == ["text_embeddings", "image_embeddings", "processingTimeMs"]
        close(answer.json()["text_embeddings"], [wanted("a cat"), wanted("two dogs")])
        close(answer.json()["image_embeddings"], [wanted(RED), wanted(BLUE), wanted(RED)])
        assert int(answer.headers["x-shoal-batches"]) == 2


async def test_one_side_alone() -> None:
    """The other side is omitted, whether it was null or absent."""
    async with family(CLIP) as server:
        answer = await server.call("POST", "/infer", {"model_name": CLIP, "text": None, "image": inline(RED)})
        assert list(answer.json()) == ["image_embeddings", "processingTimeMs"]
        close(answer.json()["image_embeddings"], [wanted(RED)])
        answer = await server.call("POST", "/infer", {"model_name": CLIP, "text": "a cat"})
        assert list(answer.json()) == ["text_embeddings", "processingTimeMs"]


@pytest.mark.parametrize("dimensions", ["n_dims", "nDims"])
async def test_options(dimensions: str) -> None:
    """Dimensions and normalization apply to images, too."""
    async with family(CLIP) as server:
        body = {"name": CLIP, "image": inline(RED), "text": "a", dimensions: 2}
        answer = (await server.call("POST", "/infer", body)).json()
        close(answer["image_embeddings"], [wanted(RED, 2)])
        close(answer["text_embeddings"], [wanted("a", 2)])
        answer = (await server.call("POST", "/infer_image", {**body, "normalize": False})).json()
        assert max(answer["embedding"][0]) > 1.0


async def test_a_large_body() -> None:
    """It is read in slices, with the other field names."""
    large = b"large " * 40_000
    async with family(CLIP) as server:
        body = {"image": [inline(RED), inline(large)], "text": ["a"], "nDims": 3, "name": CLIP}
        answer = await server.call("POST", "/infer", {**body, "imageDownloadHeaders": {"x": "y"}})
        assert answer.status == 200, answer.body
        close(answer.json()["image_embeddings"], [wanted(RED, 3), wanted(large, 3)])


class Side(RecordingRunner):
    """Answers texts once images have started, and vice versa, so a serial server would hang."""

    def __init__(self, *, fails: type | None = None) -> None:
        super().__init__()
        self.facts = replace(self.facts, modalities=("text", "image"))
        self.fails = fails
        self.here = {str: asyncio.Event(), Image: asyncio.Event()}
        self.given_up: list[type] = []

    async def run(self, task: Any, ctx: Context) -> Result:
        assert isinstance(task, Embed)
        kind = type(task.inputs[0])
        self.here[kind].set()
        await self.here[Image if kind is str else str].wait()
        if self.fails is not None:
            if kind is self.fails:
                raise Overloaded("the queue is full: try again", retry_after=2.0)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up.append(kind)
                raise
        return Embedded(vectors=np.ones((len(task.inputs), 4), np.float32), tokens=[1] * len(task.inputs))


BOTH = {"model_name": MODEL, "text": "a", "image": inline(RED)}


async def test_both_sides_run_concurrently() -> None:
    async with asyncio.timeout(30):
        answer = await serve(Side()).call("POST", "/infer", BOTH)
    assert answer.status == 200


@pytest.mark.parametrize(("fails", "other", "modality"), [(str, Image, "text"), (Image, str, "image")])
async def test_one_failed_side_cancels_the_other(fails: type, other: type, modality: str) -> None:
    """The other side ends before the error is sent, which names the side and keeps its status."""
    runner = Side(fails=fails)
    async with asyncio.timeout(30):
        answer = await serve(runner).call("POST", "/infer", BOTH)
    assert (answer.status, answer.json()) == (429, {"detail": f"{modality}: the queue is full: try again"})
    assert answer.headers["retry-after"] == "2"
    assert runner.given_up == [other]


NOT_LOADED = "Model nobody with checkpoint None is not loaded. Load the model first using /load_model."
NO_IMAGES = f"Model {EMBEDDER} with checkpoint None does not support image inference."
NEXT = "send an http(s) URL, a data URI (data:image/png;base64,...) or the base64 of an image file"


@pytest.mark.parametrize("path", ["/infer_image", "/embed_image", "/infer"])
@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"model_name": "nobody", "image": "x"}, NOT_LOADED),
        ({"model_name": EMBEDDER, "image": "x"}, NO_IMAGES),
        ({"model_name": RERANKER, "image": "x"}, NO_IMAGES.replace(EMBEDDER, RERANKER)),
        ({"model_name": CLIP, "image": []}, "`image` is an empty list; send at least one image."),
        (
            {"model_name": CLIP, "image": ["x"] * 9},
            "`image` has more than 8 images; split the request.",
        ),
        ({"model_name": CLIP, "image": ""}, f"Invalid image. the image is empty: {NEXT}"),
        ({"model_name": CLIP, "image": [inline(RED), ""]}, f"Invalid image. input 1: the image is empty: {NEXT}"),
        (
            {"model_name": CLIP, "image": inline(RED), "image_download_headers": {"Host": "a"}, "n_dims": 99},
            "dimensions must be between 1 and 4",
        ),
    ],
)
async def test_refused(path: str, body: Any, detail: str) -> None:
    """400 with one message, the original's if it has one."""
    async with family(CLIP, EMBEDDER, RERANKER, max_inputs=8) as server:
        answer = await server.call("POST", path, body)
        assert (answer.status, answer.json()) == (400, {"detail": detail})


async def test_a_bad_image_next_to_a_text() -> None:
    """400 that names the side, with the reason and the next step."""
    async with family(CLIP) as server:
        answer = await server.call("POST", "/infer", {"model_name": CLIP, "text": "a", "image": "/etc/passwd"})
        detail = answer.json()["detail"]
        assert (answer.status, detail.startswith("image: Invalid image. "), NEXT in detail) == (400, True, True)


async def test_too_many_texts_next_to_images() -> None:
    """Each side has its own limit."""
    async with family(CLIP, max_inputs=2) as server:
        answer = await server.call("POST", "/infer", {"model_name": CLIP, "text": ["a"] * 3, "image": inline(RED)})
        assert "`text` has more than 2 texts; split the request." in answer.json()["detail"]


async def test_an_image_only_model() -> None:
    """It rejects texts with the original's message."""
    async with family(CLIP, facts={"modalities": ("image",)}) as server:
        assert (await server.call("POST", "/infer_image", {"name": CLIP, "image": inline(RED)})).status == 200
        answer = await server.call("POST", "/infer", {"name": CLIP, "image": inline(RED), "text": "a"})
        detail = f"Model {CLIP} with checkpoint None does not support text inference."
        assert (answer.status, answer.json()) == (400, {"detail": detail})


@pytest.mark.parametrize(
    ("body", "at", "kind"),
    [
        ({"model_name": CLIP}, ["body", "image"], "missing"),
        ({"model_name": CLIP, "image": 5}, ["body", "image"], "string_type"),
        ({"model_name": CLIP, "image": ["a", None]}, ["body", "image", 1], "string_type"),
        (
            {"model_name": CLIP, "image": "x", "image_download_headers": ["a"]},
            ["body", "image_download_headers"],
            "model_attributes_type",
        ),
    ],
)
async def test_invalid_bodies(body: Any, at: list[Any], kind: str) -> None:
    """422, with the location."""
    async with family(CLIP) as server:
        answer = await server.call("POST", "/infer_image", body)
        assert answer.status == 422, answer.body
        (problem,) = answer.json()["detail"]
        assert (problem["loc"], problem["type"]) == (at, kind)


async def test_download_headers_are_bounded() -> None:
    """Too large headers are not read, in either spelling."""
    async with family(CLIP) as server:
        for name in ("image_download_headers", "imageDownloadHeaders"):
            many = {f"x-{number}": "y" for number in range(8000)}
            answer = await server.call("POST", "/infer_image", {"name": CLIP, "image": inline(RED), name: many})
            detail = {"detail": "image_download_headers have more than 32768 bytes in total; send fewer."}
            assert (answer.status, answer.json()) == (400, detail)


def fetching(image_fetcher: Fetcher) -> dict[str, Any]:
    return {"image_reader": ImageReader(image_fetcher)}


@pytest.mark.parametrize("name", ["image_download_headers", "imageDownloadHeaders"])
@pytest.mark.parametrize("path", ["/infer_image", "/infer"])
async def test_an_image_is_fetched_with_the_headers(path: str, name: str) -> None:
    """From a host that the operator allows."""
    async with web() as host, family(CLIP, **fetching(fetcher(host))) as server:
        host.answer = http(RED)
        body = {"model_name": CLIP, "image": url(host), name: {"authorization": "Bearer secret"}}
        answer = await server.call("POST", path, body)
        vectors = answer.json().get("embedding") or answer.json()["image_embeddings"]
        close(vectors, [wanted(RED)])
        assert "authorization: Bearer secret" in host.requests[0]


@pytest.mark.parametrize("path", ["/infer_image", "/infer", "/classify_image"])
@pytest.mark.parametrize("model", [EMBEDDER, "nobody"])
async def test_nothing_is_fetched_for_a_model_without_images(path: str, model: str) -> None:
    """The request is rejected first."""
    async with web() as host, family(EMBEDDER, **fetching(fetcher(host))) as server:
        answer = await server.call("POST", path, {"model_name": model, "image": url(host)})
        assert answer.status == 400
        assert host.requests == []


async def test_no_fetcher() -> None:
    """Without a fetcher, a URL is rejected."""
    async with family(CLIP) as server:
        body = {"model_name": CLIP, "image": "https://example.com/image1.jpg"}
        answer = await server.call("POST", "/infer_image", body)
        assert answer.status == 400
        assert answer.json()["detail"].startswith("Invalid image. ")


async def test_forbidden_download_headers() -> None:
    """The error is about the headers, not the image."""
    async with web() as host, family(CLIP, **fetching(fetcher(host))) as server:
        body = {"model_name": CLIP, "image": url(host), "image_download_headers": {"Host": "other"}}
        answer = await server.call("POST", "/infer_image", body)
        assert answer.status == 400
        assert answer.json()["detail"].startswith("image_download_headers cannot contain Host")


class Ends(Observer):
    def __init__(self) -> None:
        self.refusals: list[str] = []

    def refused(self, kind: str, surface: str = "") -> None:
        self.refusals.append(kind)


async def test_a_rejected_image_is_counted_once() -> None:
    """The front counts it, because the gateway never receives the request."""
    observer = Ends()
    async with family(CLIP, observer=observer) as server:
        await server.call("POST", "/infer_image", {"name": CLIP, "image": "no picture"})
    assert observer.refusals == [InvalidValue.kind]

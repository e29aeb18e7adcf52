"""Images on /v1/embeddings, in the formats of Infinity, NIM, Jina, OpenAI's content parts and vLLM."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from math import inf
from typing import Any

import numpy as np
import pytest

from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.http.images import INLINE_CHARACTERS, ImageReader
from shoal.types import Image
from tests.surfaces.family_kit import CLIP, DIMENSION, EMBEDDER, family
from tests.surfaces.image_fetch_kit import ONE, TWO, Album
from tests.surfaces.surface_kit import Server

FILE = b"the bytes of a picture, or nearly"
DATA = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
RAW = base64.b64encode(FILE).decode()
SEEN, LINKED, OTHER = Image(FILE), Image(ONE.encode()), Image(TWO.encode())
TEXT = "a group of fish"


def unit(item: str | list[int] | Image) -> Any:
    vector = compute_vector(tokenize_item(item), DIMENSION)
    return vector / np.linalg.norm(vector)


@pytest.fixture
def album() -> Album:
    return Album()


@pytest.fixture
async def server(album: Album) -> AsyncIterator[Server]:
    async with family(EMBEDDER, CLIP, image_reader=album.image_reader(), token_ids="accept") as server:
        yield server


CASES: list[tuple[dict[str, Any], list[Any]]] = [
    # Infinity
    ({"input": DATA, "modality": "image"}, [SEEN]),
    ({"input": [ONE, RAW, DATA], "modality": "image"}, [LINKED, SEEN, SEEN]),
    ({"input": [TEXT], "modality": "text"}, [TEXT]),
    ({"input": [DATA], "modality": None}, [DATA]),
    # NIM
    ({"input": [TEXT, DATA], "modality": ["text", "image"]}, [TEXT, SEEN]),
    # Jina
    ({"input": [{"text": TEXT}, {"image": ONE}, TEXT, {"image": RAW}]}, [TEXT, LINKED, TEXT, SEEN]),
    ({"input": [{"text": TEXT, "image": None}, {"image_url": {"url": TWO}}]}, [TEXT, OTHER]),
    ({"input": [{"image": ONE}, RAW], "modality": "image", "image_download_headers": None}, [LINKED, SEEN]),
    # OpenAI's content parts, and those of its Responses API
    (
        {"input": [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}]},
        [TEXT, SEEN],
    ),
    ({"input": [{"type": "input_image", "image_url": TWO}, {"type": "input_text", "text": TEXT}]}, [OTHER, TEXT]),
    ({"input": [[7, 8], {"image": DATA}]}, [[7, 8], SEEN]),
    # vLLM
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ONE}}]}]}, [LINKED]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}, [TEXT]),
    ({"messages": [{"content": TEXT}]}, [TEXT]),
    ({"messages": [{"content": []}, {"content": [{"image": DATA}]}]}, [SEEN]),
]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
@pytest.mark.parametrize(("fields", "items"), CASES)
async def test_forms(server: Server, path: str, fields: dict[str, Any], items: list[Any]) -> None:
    """Each input becomes its own vector, in order; only texts count tokens."""
    answer = await server.call("POST", path, {"model": CLIP, **fields})
    reply = answer.json()
    assert answer.status == 200, reply
    assert [each["index"] for each in reply["data"]] == list(range(len(items)))
    assert np.allclose([each["embedding"] for each in reply["data"]], [unit(each) for each in items], atol=1e-6)
    tokens = sum(len(tokenize_item(each)) for each in items if not isinstance(each, Image))
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_vector_options_for_images(server: Server) -> None:
    """`dimensions` and base64 work as they do for texts."""
    body = {"model": CLIP, "input": [{"image": DATA}], "dimensions": 2, "encoding_format": "base64"}
    (entry,) = (await server.call("POST", "/v1/embeddings", body)).json()["data"]
    cut = compute_vector(tokenize_item(SEEN), DIMENSION)[:2]
    assert np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") == pytest.approx(cut / np.linalg.norm(cut))


async def test_headers_reach_the_fetcher(server: Server, album: Album) -> None:
    """The client's headers are sent for each URL, which is fetched once, in the client's share."""
    headers = {"authorization": "Bearer x"}
    body = {"model": CLIP, "input": [ONE, DATA, TWO], "modality": "image", "image_download_headers": headers}
    assert (await server.call("POST", "/v1/embeddings", body)).status == 200
    assert sorted(album.fetched) == sorted([(ONE, headers), (TWO, headers)])
    assert album.clients == {"127.0.0.1"}


async def test_a_large_image(server: Server) -> None:
    """In every format, above the size that is decoded at once."""
    data = FILE * 100_000
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    for fields in (
        {"input": uri, "modality": "image"},
        {"input": [uri], "modality": ["image"]},
        {"input": [{"type": "image_url", "image_url": {"url": uri}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]},
    ):
        answer = await server.call("POST", "/v1/embeddings", {"model": CLIP, **fields})
        assert answer.status == 200, answer.body
        assert answer.json()["data"][0]["embedding"] == pytest.approx(unit(Image(data)), abs=1e-6)


async def test_many_small_images_yield_to_the_loop() -> None:
    """Decoding on the loop without a break is limited per request, not only per image."""
    text = base64.b64encode(FILE * 400).decode()
    count = 4 * INLINE_CHARACTERS // len(text)
    iterations = 0

    def turn() -> None:
        nonlocal iterations
        iterations += 1
        loop.call_soon(turn)

    loop = asyncio.get_running_loop()
    loop.call_soon(turn)
    assert await ImageReader().read([text] * count, deadline=inf) == [Image(FILE * 400)] * count
    assert iterations >= 3


PART = {"type": "image_url", "image_url": ONE}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": [{"image": ONE}], "model": EMBEDDER}, "input", "accepts only text"),
        ({"input": ONE, "modality": "image", "model": EMBEDDER}, "input", "accepts only text"),
        ({"messages": [{"content": [PART]}], "model": EMBEDDER}, "input", "accepts only text"),
        ({"input": [ONE] * 2049, "modality": "image"}, "input", "more than 2048"),
        ({"input": [{"image": ONE}] * 2049}, "input", "more than 2048"),
        ({"input": ONE, "modality": "audio"}, "modality", "'modality' is invalid"),
        ({"input": [ONE], "modality": ["image", "image"]}, "modality", "2 entries for 1 inputs"),
        ({"input": [1, 2], "modality": "image"}, "input", "token ids"),
        ({"input": [[1, 2]], "modality": ["image"]}, "input", "token ids"),
        ({"input": [{"image": ONE}, 7]}, "input", "mixes"),
        ({"input": [{"image": ONE}, [7], "a"]}, "input", "mixes"),
        ({"input": [{"image": ONE}, ""]}, "input", "'input[1]' is empty"),
        ({"input": [{"image": ONE, "text": "a"}]}, "input", "'input[0]' has several of"),
        ({"input": [{"image": ONE, "image_url": ONE}]}, "input", "'input[0]' has several of"),
        ({"input": ["a", {"type": "image_url"}]}, "input", "'input[1]' has no 'text' and no 'image'"),
        ({"input": [{"type": "text", "image": ONE}]}, "input", "of type text but contains something else"),
        ({"input": [{"type": "image_url", "text": "a"}]}, "input", "of type image_url but contains something else"),
        ({"input": [{"type": "video_url", "text": "a"}]}, "input", "'input[0].type' is invalid"),
        ({"input": [{"image": {"link": ONE}}]}, "input", "Missing required field 'input[0].image.url'"),
        ({"input": [{"image": ONE}], "image_download_headers": 7}, "image_download_headers", "is invalid"),
        ({"input": [{"image": ONE}], "image_download_headers": {"a": 7}}, "image_download_headers", "is invalid"),
        ({"input": [{"image": ONE}], "int8": 1, "normalize": False, "output_dtype": "int8"}, "normalize", "int8"),
        ({"messages": []}, "messages", "has no text or image"),
        ({"messages": [{"content": [PART, PART]}]}, "messages", "has more than one"),
        ({"messages": [{"content": [PART]}, {"content": "a"}]}, "messages", "has more than one"),
        ({"messages": [{"content": ""}]}, "messages", "an empty text"),
        ({"messages": [{"content": [{"type": "text"}]}]}, "messages", "'messages[0].content[0]' has no 'text'"),
        ({"messages": [{"content": "a"}], "input": "a"}, "messages", "'input' and 'messages'"),
        ({"messages": [{"content": "a"}], "modality": "text"}, "modality", "applies to 'input'"),
        ({}, "input", "Missing required field 'input'"),
    ],
)
async def test_refused_before_anything_is_fetched(
    server: Server, album: Album, fields: dict[str, Any], param: str, words: str
) -> None:
    """The error names the field, and no URL was fetched."""
    answer = await server.call("POST", "/v1/embeddings", {"model": CLIP, **fields})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert words in error["message"]
    assert not album.fetched


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": "", "modality": "image"}, "input", "'input[0]': the image is empty"),
        ({"input": [TEXT, {"image": DATA}, {"image": "/etc/passwd"}]}, "input", "'input[2].image': the text is no"),
        ({"input": [{"image": DATA}, {"image_url": {"url": "ftp://a/b"}}]}, "input", "'input[1].image_url.url': "),
        ({"messages": [{"content": [{"image": "nothing"}]}]}, "messages", "'messages[0].content[0].image': "),
        ({"input": [TEXT, "nan-item", {"image": DATA}, ""]}, "input", "'input[3]' is empty"),
    ],
)
async def test_an_invalid_image_is_named(server: Server, fields: dict[str, Any], param: str, text: str) -> None:
    """By the client's own field name, whatever else is in the request."""
    answer = await server.call("POST", "/v1/embeddings", {"model": CLIP, **fields})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert error["message"].startswith(text)


async def test_total_size_of_images() -> None:
    """An error about the whole list does not name a single image."""
    async with family(CLIP, image_reader=Album().image_reader(max_bytes=40)) as server:
        answer = await server.call("POST", "/v1/embeddings", {"model": CLIP, "input": [ONE, TWO], "modality": "image"})
        assert answer.json()["error"]["message"].startswith("the images of this request have more than 40 bytes")
        assert answer.status == 400


async def test_no_fetcher(album: Album) -> None:
    """The default: a URL is rejected with its place in the request; an inline image is read."""
    async with family(CLIP) as server:
        refused = await server.call("POST", "/v1/embeddings", {"model": CLIP, "input": [{"image": ONE}]})
        assert (refused.status, refused.json()["error"]["message"][:18]) == (400, "'input[0].image': ")
        assert (await server.call("POST", "/v1/embeddings", {"model": CLIP, "input": [{"image": DATA}]})).status == 200


async def test_an_image_only_model(album: Album) -> None:
    """A text next to an image is rejected before the image is fetched."""
    async with family(CLIP, image_reader=album.image_reader(), facts={"modalities": ("image",)}) as server:
        body = {"model": CLIP, "input": [{"image": ONE}, "a"]}
        answer = await server.call("POST", "/v1/embeddings", body)
        assert (answer.status, "only images" in answer.json()["error"]["message"]) == (400, True)
        assert not album.fetched
        assert (await server.call("POST", "/v1/embeddings", {**body, "input": [{"image": ONE}]})).status == 200

"""Images as files of a form, as browsers, curl -F and Python clients upload them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.surfaces import ImageReader
from tests.surfaces.family_kit import CLIP, EMBEDDER, family
from tests.surfaces.image_form_kit import BLUE, BOUNDARY, FORM, RED, File, close, form, inline, wanted
from tests.surfaces.surface_kit import Answer
from tests.unit.http.fetching.kit import fetcher, http, url, web

PATHS = ["/infer_image", "/embed_image", "/infer", "/classify_image"]
A, B = ("a.png", RED), ("b.png", BLUE)


async def upload(
    path: str, *fields: tuple[str, str | File], body: bytes | None = None, headers: Any = None, **options: Any
) -> Answer:
    async with family(CLIP, EMBEDDER, **options) as server:
        return await server.call("POST", path, body=form(*fields) if body is None else body, headers=headers or FORM)


async def test_files() -> None:
    """One or several files, in order."""
    for files, expected in (([A], [RED]), ([B, A, B], [BLUE, RED, BLUE])):
        answer = await upload("/infer_image", ("model_name", CLIP), *(("image", file) for file in files))
        assert answer.status == 200, answer.body
        close(answer.json()["embedding"], [wanted(each) for each in expected])


async def test_files_and_texts_with_options() -> None:
    """Each JSON field is a form field, repeated for lists."""
    fields: list[tuple[str, str | File]] = [
        ("name", CLIP),
        ("text", "a cat"),
        ("image", A),
        ("text", "né"),
        ("nDims", "2"),
    ]
    answer = await upload("/infer", *fields, ("normalize", "true"), ("pretrained", "laion2b"))
    assert answer.status == 200, answer.body
    close(answer.json()["text_embeddings"], [wanted("a cat", 2), wanted("né", 2)])
    close(answer.json()["image_embeddings"], [wanted(RED, 2)])
    answer = await upload("/infer", ("name", CLIP), ("image", A), ("normalize", "false"))
    assert max(answer.json()["image_embeddings"][0]) > 1.0
    answer = await upload("/infer", ("name", CLIP), ("text", "a cat"))
    assert list(answer.json()) == ["text_embeddings", "processingTimeMs"]


async def test_images_as_texts() -> None:
    """An image may also be a text, as in JSON, next to files; the form's order is kept."""
    async with web() as host:
        host.answer = http(BLUE)
        answer = await upload(
            "/infer_image",
            ("model_name", CLIP),
            ("image", A),
            ("image", inline(BLUE)),
            ("image", url(host)),
            ("image", A),
            ("image_download_headers", '{"x-token": "t"}'),
            image_reader=ImageReader(fetcher(host)),
        )
        assert answer.status == 200, answer.body
        close(answer.json()["embedding"], [wanted(each) for each in (RED, BLUE, BLUE, RED)])
        assert "x-token: t" in host.requests[0]


async def test_labels() -> None:
    """One field per label."""
    fields: list[tuple[str, str | File]] = [("model_name", CLIP), ("image", A), ("labels", "cat"), ("labels", "dog")]
    answer = await upload("/classify_image", *fields)
    assert [len(row) for row in answer.json()["probabilities"]] == [2]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            [("model_name", CLIP), ("image", A), ("picture", B)],
            {"type": "extra_forbidden", "loc": ["body", "picture"]},
        ),
        ([("model_name", CLIP), ("image", A), ("name", "x"), ("name", "y")], {"loc": ["body", "name"]}),
        ([("model_name", ("m.txt", b"clip")), ("image", A)], {"loc": ["body", "model_name"]}),
        ([("image", A), ("text", "a")][:1], {"type": "missing", "loc": ["body", "model_name"]}),
        (
            [("model_name", CLIP), ("image", A), ("image_download_headers", "{")],
            {"type": "model_attributes_type", "loc": ["body", "image_download_headers"]},
        ),
        (
            [("model_name", CLIP), ("image", A), ("image_download_headers", "[1]")],
            {"type": "model_attributes_type", "loc": ["body", "image_download_headers"]},
        ),
    ],
)
async def test_invalid_forms(path: str, fields: Any, problem: dict[str, Any]) -> None:
    """422 in the format of all other bodies, naming the field."""
    answer = await upload(path, *fields)
    assert answer.status == 422, answer.body
    (error,) = answer.json()["detail"]
    assert set(error) == {"type", "loc", "msg", "input"}
    assert problem.items() <= error.items()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("normalize", "maybe", "bool_type"), ("n_dims", "many", "int_type"), ("n_dims", "0", "int_type")],
)
async def test_values_of_the_wrong_type(name: str, value: str, kind: str) -> None:
    """A form's texts are converted to the field's type, or rejected."""
    answer = await upload("/infer_image", ("model_name", CLIP), ("image", A), (name, value))
    assert answer.status == 422
    (error,) = answer.json()["detail"]
    assert (error["loc"], error["type"]) == (["body", name], kind)


async def test_a_form_without_an_image() -> None:
    answer = await upload("/infer_image", ("model_name", CLIP))
    assert (answer.status, answer.json()["detail"][0]["loc"]) == (422, ["body", "image"])
    answer = await upload("/infer", ("model_name", CLIP))
    assert (answer.status, answer.json()["detail"][:25]) == (400, "The request has no inputs")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (form(("model_name", CLIP), ("image", A))[:-4], FORM, "boundary is missing; send it again"),
        (form(("model_name", CLIP), ("image", A)), {"content-type": "multipart/form-data"}, "has no boundary"),
        (b"{}", FORM, "could not be read as multipart/form-data"),
        (b"", FORM, "boundary is missing"),
    ],
)
async def test_broken_forms(path: str, body: bytes, headers: Any, message: str) -> None:
    """422, with a type that names the form."""
    answer = await upload(path, body=body, headers=headers)
    assert answer.status == 422, answer.body
    (error,) = answer.json()["detail"]
    assert (error["type"], message in error["msg"]) == ("multipart_invalid", True)


async def test_routes_without_forms() -> None:
    """415 with the accepted type: forms are only for images, and no other multipart is read."""
    fields: list[tuple[str, str | File]] = [("model_name", CLIP), ("text", "a")]
    assert (await upload("/infer_text", *fields)).status == 415
    answer = await upload("/infer", *fields, headers={"content-type": f"multipart/mixed; boundary={BOUNDARY}"})
    assert (answer.status, "application/json" in answer.json()["detail"]) == (415, True)


async def test_bounds() -> None:
    """Limits for files, headers, images and parts; an error gives the image's index among all images."""
    small = ImageReader(max_bytes=100)
    fields: list[tuple[str, str | File]] = [("model_name", CLIP), ("image", inline(RED)), ("image", ("x", b"x" * 101))]
    answer = await upload("/infer_image", *fields, image_reader=small)
    detail = "Invalid image. input 1: the image has 101 bytes, more than the limit of 100: send a smaller one"
    assert (answer.status, answer.json()) == (400, {"detail": detail})
    answer = await upload("/infer_image", ("model_name", CLIP), ("image", ("x", b"x" * 101)), image_reader=small)
    assert answer.json()["detail"].startswith("Invalid image. the image has 101 bytes")
    headers = ("image_download_headers", '{"a": "' + "x" * 40_000 + '"}')
    answer = await upload("/infer_image", ("model_name", CLIP), ("image", A), headers)
    assert (answer.status, "more than 32768 bytes" in answer.json()["detail"]) == (400, True)
    for count, message in ((4, "more than 3 images"), (40, "more than 19 parts")):
        answer = await upload("/infer_image", ("model_name", CLIP), *[("image", A)] * count, max_inputs=3)
        assert (answer.status, message in answer.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("order", "place"), [(["file", "bad", "file"], 1), (["file", "good", "bad"], 2), (["bad", "good", "file"], 0)]
)
async def test_a_bad_image_among_files_is_named(order: list[str], place: int) -> None:
    """The index counts all images of the form, not only the texts."""
    files: dict[str, str | File] = {"file": A, "good": inline(RED), "bad": "/etc/passwd"}
    answer = await upload("/infer_image", ("model_name", CLIP), *(("image", files[each]) for each in order))
    assert answer.status == 400
    assert answer.json()["detail"].startswith(f"Invalid image. input {place}: ")


async def test_a_model_without_images() -> None:
    """The same message as for JSON."""
    answer = await upload("/infer_image", ("model_name", EMBEDDER), ("image", A))
    detail = f"Model {EMBEDDER} with checkpoint None does not support image inference."
    assert (answer.status, answer.json()) == (400, {"detail": detail})


WHOLE = form(("model_name", CLIP), ("text", "a"), ("image", A), ("image", inline(BLUE)), ("normalize", "1"))


@given(start=st.integers(0, len(WHOLE)), stop=st.integers(0, len(WHOLE)), more=st.binary(max_size=8))
def test_any_damage_is_answered_in_the_dialect(start: int, stop: int, more: bytes) -> None:
    """Truncated and with bytes inserted: 200, or a 4xx with its detail."""
    body = WHOLE[:stop] + more + WHOLE[stop + start :]
    answer = asyncio.run(upload("/infer", body=body))
    assert answer.status in {200, 400, 422}, answer.body
    if answer.status != 200:
        assert isinstance(answer.json()["detail"], list) == (answer.status == 422)


async def test_forms_are_in_openapi() -> None:
    """They are declared next to the JSON on the routes that read them; an image is a file there."""
    async with family(CLIP) as server:
        document = (await server.call("GET", "/openapi.json")).json()
        for path, item in document["paths"].items():
            content = item.get("post", {}).get("requestBody", {}).get("content", {})
            if path != "/v1/files":
                assert ("multipart/form-data" in content) == (path in PATHS)
        fields = document["components"]["schemas"]["InferForm"]["properties"]
        assert fields["image"]["items"]["format"] == "binary"

"""The inference server's routes, message for message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.core.lifecycle.lifecycle import Entry, LoadOptions
from shoal.core.protocols import ModelFacts
from shoal.errors import Conflict, ModelFileError, SourceError, TransportFailed
from tests.surfaces.life_kit import FOREIGN, OTHER, Living, Scripted, living
from tests.surfaces.surface_kit import MODEL, RecordingRunner, raising, serve, vector

NOT_LOADED = "Model nobody with checkpoint None is not loaded. Load the model first using /load_model."


async def say(life: Living, path: str, **fields: Any) -> Any:
    answer = await life.manage("POST", path, fields)
    assert answer.status == 200, answer.body
    return answer.json()


async def test_load() -> None:
    """A second load reports that the model is already loaded; then it embeds."""
    async with living() as life:
        loaded = {"message": f"Model {OTHER} loaded successfully."}
        assert await say(life, "/load_sentence_transformer_model", model_name=OTHER) == loaded
        already = {"message": f"Model {OTHER} is already loaded."}
        assert await say(life, "/load_sentence_transformer_model", model_name=OTHER) == already
        answer = await life.call("POST", "/infer_text", {"model_name": OTHER, "text": "ab"})
        assert answer.json()["embedding"] == [vector("ab")]


async def test_unload() -> None:
    """An unloaded model cannot be used; unloading it again is no error."""
    async with living() as life:
        unloaded = {"message": f"Model {MODEL} with checkpoint None unloaded successfully."}
        assert await say(life, "/unload_model", model_name=MODEL) == unloaded
        assert life.loader.touched == [("close", MODEL)]
        again = {"message": f"Model {MODEL} with checkpoint None is not loaded."}
        assert await say(life, "/unload_model", model_name=MODEL) == again
        assert (await life.call("POST", "/infer_text", {"model_name": MODEL, "text": "a"})).status == 400


async def test_delete() -> None:
    """The model is unloaded first; deleting a missing one gives the same message, like the original."""
    async with living() as life:
        deleted = {"message": f"Model {MODEL} with checkpoint laion2b deleted successfully."}
        assert await say(life, "/delete_model", model_name=MODEL, pretrained="laion2b") == deleted
        assert life.loader.touched == [("close", MODEL), ("remove", MODEL)]
        assert await say(life, "/delete_model", model_name=MODEL, pretrained="laion2b") == deleted


async def test_models_of_others_are_not_deleted() -> None:
    """403 with the reason."""
    async with living() as life:
        answer = await life.manage("POST", "/delete_model", {"model_name": FOREIGN})
        assert answer.status == 403
        assert answer.json() == {"detail": f"{FOREIGN} was not made by Shoal: delete it where it was made"}


async def test_load_options() -> None:
    """Backend and text_in reach the loader."""
    async with living() as life:
        await say(life, "/load_sentence_transformer_model", model_name=OTHER, backend="triton", text_in=True)
        assert life.loader.options == [LoadOptions(backend="triton", text_in=True)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SourceError("the hub has no such model: check the name"), 424),
        (ModelFileError("is missing", file="config.json"), 424),
        (TransportFailed("Triton is not there: start it"), 502),
        (Conflict("somebody unloads it: try again"), 409),
    ],
)
async def test_a_load_that_fails(error: Any, status: int) -> None:
    """The reason is the detail, and another attempt starts again."""
    async with living(Scripted(error=error)) as life:
        for _ in range(2):
            answer = await life.manage("POST", "/load_sentence_transformer_model", {"model_name": OTHER})
            assert (answer.status, answer.json()) == (status, {"detail": error.message})
        assert life.loader.touched == [("fetch", OTHER)] * 2
        assert (await life.call("GET", "/loaded_models")).json() == {"models": [MODEL]}


async def test_two_loads_of_one_name_join() -> None:
    """Both succeed, and the model is opened once."""
    loader = Scripted(hold=asyncio.Event())
    async with living(loader) as life:
        body = {"model_name": OTHER}
        tasks = [asyncio.create_task(life.manage("POST", "/load_sentence_transformer_model", body)) for _ in range(2)]
        await loader.begun.wait()
        assert loader.hold is not None
        loader.hold.set()
        answers = await asyncio.gather(*tasks)
        assert [answer.json()["message"] for answer in answers] == [f"Model {OTHER} loaded successfully."] * 2
        assert [step for step, _ in loader.touched].count("open") == 1


async def test_lists() -> None:
    """Loaded models by name; all models with their state, also those that Shoal did not create."""
    entries = [
        Entry(name=MODEL, source=f"hf:{MODEL}", backend="local"),
        Entry(name=OTHER, source=f"hf:{OTHER}", backend="local"),
        Entry(name=FOREIGN, source="triton://host:8001", backend="triton", managed=False),
    ]
    async with living(Scripted(listed=entries)) as life:
        assert (await life.call("GET", "/loaded_models")).json() == {"models": [MODEL]}
        models = (await life.call("GET", "/repository_models")).json()["models"]
        assert sorted(models, key=lambda each: each["name"]) == [
            {"name": MODEL, "state": "READY"},
            {"name": OTHER, "state": "UNAVAILABLE"},
            {"name": FOREIGN, "state": "UNAVAILABLE", "managed": False},
        ]


async def test_a_failed_model_is_listed_with_its_reason() -> None:
    async with living(Scripted(error=SourceError("no such model"))) as life:
        await life.manage("POST", "/load_sentence_transformer_model", {"model_name": OTHER})
        models = (await life.call("GET", "/repository_models")).json()["models"]
        assert {"name": OTHER, "state": "UNAVAILABLE", "reason": "no such model"} in models


async def test_infer_text() -> None:
    """One text or many: always two-dimensional, with the time in milliseconds."""
    server = serve()
    for text, vectors in (("ab", [vector("ab")]), (["ab", "", "c"], [vector("ab"), vector(""), vector("c")])):
        answer = await server.call("POST", "/infer_text", {"model_name": MODEL, "text": text})
        assert list(answer.json()) == ["embedding", "processingTimeMs"]
        assert answer.json()["embedding"] == vectors
        assert isinstance(answer.json()["processingTimeMs"], float)
        assert answer.headers["x-shoal-batch-size"] == "7"


async def test_infer() -> None:
    """The answer has only the requested side."""
    answer = await serve().call("POST", "/infer", {"model_name": "mini", "text": ["ab"], "image": None})
    assert list(answer.json()) == ["text_embeddings", "processingTimeMs"]
    assert answer.json()["text_embeddings"] == [vector("ab")]


@pytest.mark.parametrize("key", ["model_name", "name"])
@pytest.mark.parametrize("dimensions", ["n_dims", "nDims"])
async def test_other_names_of_fields(key: str, dimensions: str) -> None:
    """The field names of the original's later versions work, too."""
    server = serve()
    body = {key: MODEL, "text": "ab", "normalize": False, dimensions: 2}
    assert (await server.call("POST", "/infer_text", body)).status == 200
    assert (server.runner.tasks[0].normalize, server.runner.tasks[0].dimensions) == (False, 2)
    body = {"model_name": MODEL, "text": "ab", "pretrained": None, "unheard": {"of": 1}}
    await server.call("POST", "/infer", body)
    assert (server.runner.tasks[1].normalize, server.runner.tasks[1].dimensions) == (True, None)


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/infer_text", {"model_name": "nobody", "text": "a"}, NOT_LOADED),
        ("/infer", {"model_name": "nobody", "text": "a"}, NOT_LOADED),
        (
            "/infer_text",
            {"model_name": "ViT-B-32", "pretrained": "laion2b", "text": "a"},
            "Model ViT-B-32 with checkpoint laion2b is not loaded. Load the model first using /load_model.",
        ),
        ("/infer", {"model_name": MODEL}, "The request has no inputs; send `text`, `image` or both."),
        ("/infer_text", {"model_name": MODEL, "text": []}, "`text` is an empty list; send at least one text."),
        (
            "/infer",
            {"model_name": MODEL, "text": "a", "image": "https://x/y.png"},
            f"Model {MODEL} with checkpoint None does not support image inference.",
        ),
        (
            "/infer_text",
            {"model_name": MODEL, "text": ["a"] * 2049},
            "`text` has more than 2048 texts; split the request.",
        ),
    ],
)
async def test_refused(path: str, body: Any, detail: str) -> None:
    """400 with one message, and no model is called."""
    server = serve()
    answer = await server.call("POST", path, body)
    assert (answer.status, answer.json()) == (400, {"detail": detail})
    assert server.runner.tasks == []


async def test_a_model_that_does_not_embed() -> None:
    """The original's message."""
    facts = ModelFacts(source="fake", backend="fake", tasks=("generate",))
    answer = await serve(RecordingRunner(facts=facts)).call("POST", "/infer_text", {"model_name": MODEL, "text": "a"})
    detail = f"Model {MODEL} with checkpoint None does not support text inference."
    assert (answer.status, answer.json()) == (400, {"detail": detail})


MISSING = {"type": "missing", "msg": "Field required"}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"text": "a"}, {**MISSING, "loc": ["body", "model_name"], "input": {"text": "a"}}),
        ({"model_name": MODEL}, {**MISSING, "loc": ["body", "text"], "input": {"model_name": MODEL}}),
        ({"name": MODEL}, {**MISSING, "loc": ["body", "text"], "input": {"model_name": MODEL, "name": MODEL}}),
        ({"name": 5, "text": "a"}, {**MISSING, "loc": ["body", "model_name"], "input": {"name": 5, "text": "a"}}),
        (
            {"model_name": 5, "text": "a"},
            {"type": "string_type", "loc": ["body", "model_name"], "msg": "Expected `str`, got `int`", "input": 5},
        ),
        (
            {"model_name": MODEL, "text": ["a", {"b": 1}]},
            {
                "type": "string_type",
                "loc": ["body", "text", 1],
                "msg": "Expected `str`, got `object`",
                "input": {"b": 1},
            },
        ),
        (
            {"model_name": MODEL, "text": "a", "normalize": "x" * 2000},
            {"type": "bool_type", "loc": ["body", "normalize"], "msg": "Expected `bool`, got `str`", "input": None},
        ),
        (
            {"model_name": MODEL, "text": "a", "n_dims": 0},
            {"type": "int_type", "loc": ["body", "n_dims"], "msg": "Expected `int` >= 1", "input": 0},
        ),
        (7, {"type": "model_attributes_type", "loc": ["body"], "msg": "Expected `object`, got `int`", "input": 7}),
    ],
)
async def test_invalid_bodies(body: Any, problem: dict[str, Any]) -> None:
    """422 in FastAPI's format: error, location, and the value if it is short."""
    answer = await serve().call("POST", "/infer_text", body)
    assert (answer.status, answer.json()) == (422, {"detail": [problem]})


@pytest.mark.parametrize(
    ("fields", "at", "value"),
    [
        ({"n_dims": 0}, ["n_dims"], 0),
        ({"model_name": 5}, ["model_name"], 5),
        ({"normalize": [7]}, ["normalize"], [7]),
        ({"text": ["a" * 70_000, 7]}, ["text", 1], None),
        ({"text": ["a", 7], "more": "a" * 70_000}, ["text", 1], 7),
        ({"normalize": "x" * 2000}, ["normalize"], None),
        ({"model_name": None}, ["model_name"], None),
    ],
)
async def test_the_value_in_a_large_body(fields: dict[str, Any], at: list[Any], value: Any) -> None:
    """It is echoed like that of a small body, unless the field itself is large."""
    body = {"model_name": MODEL, "text": "a" * 70_000, **fields}
    answer = await serve().call("POST", "/infer_text", body)
    (problem,) = answer.json()["detail"]
    assert (answer.status, problem["loc"], problem["input"]) == (422, ["body", *at], value)


async def test_a_large_body_without_a_value_to_echo() -> None:
    """A missing field or a body broken after the error: the value is null."""
    for body in (
        b'{"x":"%b"}' % (b"a" * 70_000),
        b'{"n_dims":0,"x":"%b' % (b"a" * 70_000),
        b"[%b7]" % (b"1," * 40_000),
    ):
        answer = await serve().call("POST", "/infer_text", body=body)
        assert (answer.status, answer.json()["detail"][0]["input"]) == (422, None)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model_name":5,', b"\xff", b'{"x":' + b"[" * 200_000, b'{"name":"a","x":' + b"[" * 300 + b"]" * 300],
)
async def test_bodies_that_are_not_json(body: bytes) -> None:
    """422, whatever the bytes are."""
    answer = await serve().call("POST", "/infer_text", body=body)
    assert answer.status == 422
    (problem,) = answer.json()["detail"]
    assert set(problem) == {"type", "loc", "msg", "input"}


@pytest.mark.parametrize("depth", [200, 250, 252, 254, 400])
async def test_nested_values(depth: int) -> None:
    """A nested value is echoed only as deep as JSON can be written."""
    body = b'{"model_name":"a","text":' + b"[" * depth + b"]" * depth + b"}"
    assert (await serve().call("POST", "/infer_text", body=body)).status == 422


async def test_errors_of_the_model() -> None:
    """A text in `detail`, with a status that shows the cause."""
    answer = await raising(TransportFailed("gone")).call("POST", "/infer_text", {"model_name": MODEL, "text": "a"})
    assert (answer.status, answer.json()) == (502, {"detail": "gone"})


async def test_a_server_of_fixed_models() -> None:
    """Without a lifecycle the lists work, and changes are rejected with the reason."""
    server = serve()
    assert (await server.call("GET", "/loaded_models")).json() == {"models": [MODEL]}
    assert (await server.call("GET", "/repository_models")).json() == {"models": [{"name": MODEL, "state": "READY"}]}
    answer = await server.call("POST", "/load_sentence_transformer_model", {"model_name": OTHER})
    assert (answer.status, "fixed set of models" in answer.json()["detail"]) == (400, True)


async def test_a_large_body_with_the_alias_name() -> None:
    """`name` works in large bodies, too, at any position."""
    answer = await serve().call("POST", "/infer_text", {"text": ["a" * 100_000, "b"], "name": MODEL})
    assert answer.status == 200
    assert len(answer.json()["embedding"]) == 2

"""Legacy completions: all forms of prompts, and the features that only they have."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InvalidValue
from shoal.types import Chunk, Sampling, TokenLogprob, Usage
from tests.fakes.openai_server import fields_of
from tests.surfaces.talk_kit import MODEL, FakeRunner, data_of, serve_chat

PATHS = ["/v1/completions", "/completions", "/v1/completions/", "/completions/"]


def ask(prompt: Any = "one two", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer(path: str) -> None:
    """All keys of OpenAI's answer, on every spelling of the path."""
    body = (await serve_chat().call("POST", path, ask())).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("timings")["predicted_n"] == 2
    assert body.pop("usage")["total_tokens"] == 9
    choice = {"text": "one two", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert body == {"object": "text_completion", "model": MODEL, "choices": [choice]}


@pytest.mark.parametrize(
    ("given_prompt", "prompts"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        (["ab", "cd"], ["ab", "cd"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_all_forms_of_prompts(given_prompt: Any, prompts: list[Any]) -> None:
    """A text, texts, token ids and lists of token ids."""
    server = serve_chat()
    answer = await server.call("POST", PATHS[0], ask(given_prompt))
    assert server.runner.task.prompts == prompts
    assert [each["index"] for each in answer.json()["choices"]] == list(range(len(prompts)))


async def test_choices_are_numbered_prompt_by_prompt() -> None:
    """Two prompts with two answers each are four choices."""
    choices = (await serve_chat().call("POST", PATHS[0], ask(["a", "b"], n=2))).json()["choices"]
    assert [(each["index"], each["text"]) for each in choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3), ({"max_tokens": 0}, 0), ({"max_tokens": -1}, None)],
)
async def test_max_tokens(fields: dict[str, Any], expected: int | None) -> None:
    """The default is 16; 0 scores a prompt without generating."""
    server = serve_chat()
    await server.call("POST", PATHS[0], ask(**fields))
    assert server.runner.task.sampling.max_tokens == expected


async def test_fields_reach_the_task() -> None:
    """The fields are passed along, byte for byte."""
    server = serve_chat()
    body = orjson.dumps(ask(echo=True, best_of=4, n=2, logprobs=3, seed=1, top_k=0, use_beam_search=False))
    await server.call("POST", PATHS[0], body=body)
    task = server.runner.task
    assert (task.echo, task.best_of, task.n, task.raw) == (True, 4, 2, ("openai.completions", fields_of(body)))
    assert task.sampling == Sampling(max_tokens=16, logprobs=3, seed=1, top_k=-1)
    assert set(task.extras) == {"use_beam_search"}


async def test_logprobs() -> None:
    """The legacy format: parallel lists, the chosen token among the top ones, offsets in characters."""
    tokens = [
        TokenLogprob(token="é", logprob=-0.5, top=[TokenLogprob(token="e", logprob=-0.25)]),
        TokenLogprob(token=" b", logprob=float("-inf")),
    ]
    chunks = [Chunk(text="é b", logprobs=tokens), Chunk(finish_reason="length")]
    server = serve_chat(FakeRunner(reply=lambda task: chunks))
    choice = (await server.call("POST", PATHS[0], ask(logprobs=1))).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] == {
        "tokens": ["é", " b"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"e": -0.25, "é": -0.5}, {" b": -9999.0}],
        "text_offset": [0, 1],
    }


async def test_a_stream() -> None:
    """Texts, then the finish reason, then [DONE]; offsets continue across events."""
    answer = await serve_chat().call("POST", PATHS[0], ask("ab cd", stream=True, logprobs=0))
    *events, done = data_of(answer.body)
    assert done == "[DONE]"
    assert {each["object"] for each in events} == {"text_completion"}
    choices = [each["choices"][0] for each in events]
    assert [each["text"] for each in choices] == ["ab", " cd", ""]
    assert [each["finish_reason"] for each in choices] == [None, None, "stop"]
    assert [each["logprobs"] and each["logprobs"]["text_offset"] for each in choices] == [[0], [2], None]


@pytest.mark.parametrize(
    ("fields", "status"), [({"best_of": 1}, 200), ({"best_of": 2, "n": 2}, 200), ({"best_of": 2}, 400)]
)
async def test_best_of_in_streams(fields: dict[str, Any], status: int) -> None:
    """The best answer is known only at the end, so streams allow `best_of` only if it equals `n`, as clients send
    it."""
    assert (await serve_chat().call("POST", PATHS[0], ask(stream=True, **fields))).status == status


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (ask(None), "prompt", "got `null`"),
        ({"model": MODEL}, "prompt", "Missing required field 'prompt'"),
        (ask([]), "prompt", "empty list"),
        (ask([[1], []]), "prompt", "'prompt[1]'"),
        (ask(["a", 1]), "prompt", "mixes"),
        (ask([1, [1]]), "prompt", "mixes"),
        (ask([-1]), "prompt", ">= 0"),
        (ask([1.5]), "prompt", "got `float`"),
        (ask(["a"] * 2049), "prompt", "more than 2048"),
        (ask(["a"] * 100, n=100), "n", "more than 2048 answers"),
        (ask(["a"] * 1024, n=2, best_of=3), "best_of", "more than 2048 answers"),
        (ask(suffix="end"), "suffix", "'suffix' is not supported"),
        (ask(logprobs=6), "logprobs", "<= 5"),
        (ask(logprobs=True), "logprobs", "got `bool`"),
        (ask(best_of=21), "best_of", "<= 20"),
        (ask(best_of=1, n=2), "best_of", "cannot be less"),
        (ask(echo="yes"), "echo", "got `str`"),
    ],
)
async def test_bad_bodies(body: dict[str, Any], param: str, words: str) -> None:
    """Each is a 400 that names the field, and no work."""
    server = serve_chat()
    answer = await server.call("POST", PATHS[0], body)
    error = answer.json()["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert words in error["message"]
    assert server.runner.tasks == []


@pytest.mark.parametrize("suffix", [None, ""])
async def test_an_empty_suffix_is_ignored(suffix: Any) -> None:
    """Some clients always send it."""
    assert (await serve_chat().call("POST", PATHS[0], ask(suffix=suffix))).status == 200


async def test_the_name_of_logprobs() -> None:
    """Engines name chat's field in errors; here it is renamed. Other errors pass unchanged."""
    for param, named in (("top_logprobs", "logprobs"), ("stop", "stop")):
        server = serve_chat(FakeRunner(error=InvalidValue("not so many", param=param)))
        error = (await server.call("POST", PATHS[0], ask(logprobs=3))).json()["error"]
        assert error["param"] == named
        assert ("'logprobs' above 0" in error["message"]) == (param == "top_logprobs")


async def test_long_prompts() -> None:
    """Large bodies are decoded in slices: texts, ids, and too many of either."""
    server = serve_chat()
    texts = ["x" * 100_000, "y"]
    assert (await server.call("POST", PATHS[0], ask(texts, future=1))).status == 200
    assert (server.runner.task.prompts, set(server.runner.task.extras)) == (texts, {"future"})
    ids = list(range(30_000))
    assert (await server.call("POST", PATHS[0], ask(ids))).status == 200
    assert server.runner.task.prompts == [ids]
    answer = await server.call("POST", PATHS[0], ask(["a" * 50] * 3000))
    assert (answer.status, answer.json()["error"]["code"]) == (400, "array_above_max_length")


async def test_reasoning_becomes_text() -> None:
    """Completions have no field for reasoning, and nothing may be lost."""
    chunks = [Chunk(reasoning="hm "), Chunk(text="yes"), Chunk(finish_reason="stop"), Chunk(usage=Usage())]
    for stream in (False, True):
        answer = await serve_chat(FakeRunner(reply=lambda task: chunks)).call("POST", PATHS[0], ask(stream=stream))
        if stream:
            text = "".join(each["choices"][0]["text"] for each in data_of(answer.body)[:-1])
        else:
            text = answer.json()["choices"][0]["text"]
        assert text == "hm yes"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
names = ["echo", "best_of", "logprobs", "suffix", "n", "stream", "max_tokens", "stop", "logit_bias", "response_format"]


@given(body=st.fixed_dictionaries({"prompt": values}, optional=dict.fromkeys(names, values)))
def test_any_json(body: Any) -> None:
    """Any JSON gets an answer, or an error in OpenAI's format."""
    answer = asyncio.run(serve_chat().call("POST", PATHS[0], body=json.dumps(body).encode()))
    assert answer.status in (200, 400)
    if answer.status == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_conversation() -> None:
    """triton-openai accepts chats here, too; a body with neither field is asked for a prompt."""
    answer = await serve_chat().call("POST", PATHS[0], {"messages": [{"role": "user", "content": "hi"}]})
    assert (answer.status, answer.json()["object"]) == (200, "chat.completion")
    for body in ({}, {"messages": None}):
        answer = await serve_chat().call("POST", PATHS[0], body)
        assert (answer.status, answer.json()["error"]["message"]) == (400, "Missing required field 'prompt'.")


@pytest.mark.parametrize("name", ["dummy", "tgi"])
async def test_placeholder_model_names(name: str) -> None:
    """Hugging Face's clients send a placeholder if no model is set; other names are unknown."""
    assert (await serve_chat().call("POST", PATHS[0], {"model": name, "prompt": "a"})).status == 200
    assert (await serve_chat().call("POST", PATHS[0], {"model": f"{name}-1", "prompt": "a"})).status == 404

"""Any JSON and any bytes get an answer or an error in the dialect."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from tests.surfaces.surface_kit import MODEL, Answer, serve

ROUTES = ["/v1/embeddings", "/embed", "/tokenize", "/decode", "/v1/embedding", "/infer_text", "/infer"]
FIELDS = {
    *("input", "inputs", "ids", "model", "encoding_format", "dimensions", "truncate", "truncation_direction"),
    *("prompt_name", "normalize", "query", "add_special_tokens"),
    *("model_name", "name", "text", "image", "n_dims", "nDims", "pretrained"),
}
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from([MODEL, "base64", "float", "left", "END"])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(), inner),
    max_leaves=12,
)
plausible = st.fixed_dictionaries(
    {"input": values, "inputs": values, "ids": values, "text": values, "model": st.just(MODEL)}
    | {"model_name": st.just(MODEL) | values},
    optional=dict.fromkeys(("dimensions", "truncate", "normalize", "encoding_format"), values),
)


def post(path: str, body: bytes) -> Answer:
    return asyncio.run(
        serve(token_ids="accept").call("POST", path, body=body, headers={"content-type": "application/json"})
    )


def check(path: str, answer: Answer) -> None:
    assert answer.status == 200 or 400 <= answer.status < 500
    if answer.status == 200:
        return
    if path == "/v1/embeddings":
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif path == "/v1/embedding":
        assert set(answer.json()) == {"msg"}
    elif path.startswith("/infer"):
        detail = answer.json()["detail"]
        assert isinstance(detail, list) == (answer.status == 422)
    elif answer.headers["content-type"] == "application/json":
        assert set(answer.json()) == {"error", "error_type"}
    else:
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@given(path=st.sampled_from(ROUTES), body=values | plausible | st.lists(st.fixed_dictionaries({"query": values})))
@example(path="/v1/embeddings", body={"input": [[]], "model": MODEL})
def test_any_json(path: str, body: Any) -> None:
    """200, or a 4xx in the dialect."""
    check(path, post(path, orjson.dumps(body)))


@given(path=st.sampled_from(ROUTES), body=st.binary(max_size=64))
def test_any_bytes(path: str, body: bytes) -> None:
    check(path, post(path, body))


texts = st.text(min_size=1, max_size=8)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)


@given(inputs=texts | st.lists(texts, min_size=1, max_size=200) | ids | st.lists(ids, min_size=1, max_size=8))
def test_every_valid_input_is_answered(inputs: Any) -> None:
    """One vector per input, in order and in both encodings."""
    count = 1 if isinstance(inputs, str) or isinstance(inputs[0], int) else len(inputs)
    for encoding_format in ("float", "base64"):
        body = {"input": inputs, "model": MODEL, "encoding_format": encoding_format}
        data = post("/v1/embeddings", orjson.dumps(body)).json()["data"]
        assert [each["index"] for each in data] == list(range(count))

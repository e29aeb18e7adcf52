"""One value of a JSON body changes, and no byte of any other value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.openai.body import ModelNameRewriter, encode_request, requested_model
from tests.fakes.openai_server import fields_of

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("model"), inner, max_size=3),
    max_leaves=8,
)


def written(body: bytes, model: str = "up", strip: tuple[str, ...] = (), **defaults: Any) -> bytes:
    return encode_request(fields_of(body), model, strip=strip, defaults=defaults)


class TestRequests:
    def test_only_the_model_changes(self) -> None:
        """Numbers keep their digits, strings their escapes, and unknown fields stay unchanged."""
        body = rb'{"model":"m","temperature":1.00000000000000000001e0,"user":"\u00e9","x":[ 1 , {"model":"m"} ],"y":-0}'
        assert written(body) == body.replace(b'"model":"m","temp', b'"model":"up","temp')

    def test_blanks_between_fields_may_go(self) -> None:
        body = b'{ "model" : "m" ,\n "messages" : [ {"role": "user", "content": "a  b"} ] }'
        assert written(body) == b'{"model":"up","messages":[ {"role": "user", "content": "a  b"} ]}'

    @given(st.dictionaries(st.text().filter(lambda name: name not in ("stream_options", "model")), JSON, max_size=5))
    def test_every_other_value_is_as_it_was(self, fields: dict[str, Any]) -> None:
        body = json.dumps({**fields, "model": "m"}).encode()
        assert json.loads(written(body, "up/x")) == {**fields, "model": "up/x"}

    def test_a_body_without_a_model_gets_one(self) -> None:
        assert written(b'{"messages":[]}') == b'{"model":"up","messages":[]}'
        assert requested_model(fields_of(b'{"messages":[]}')) == ""

    @pytest.mark.parametrize(("body", "model"), [(b'{"model":"a\\u0062"}', "ab"), (b'{"model":3}', ""), (b"{}", "")])
    def test_the_name_that_the_client_gave(self, body: bytes, model: str) -> None:
        assert requested_model(fields_of(body)) == model

    def test_of_a_field_twice_the_last_counts(self) -> None:
        assert written(b'{"model":"a","seed":1,"model":"b","seed":2}') == b'{"model":"up","seed":2}'

    def test_fields_can_be_stripped(self) -> None:
        body = b'{"model":"m","chat_template":"x","priority":3,"seed":1}'
        assert written(body, strip=("chat_template", "priority")) == b'{"model":"up","seed":1}'

    def test_the_model_is_never_stripped(self) -> None:
        assert written(b'{"model":"m"}', strip=("model",)) == b'{"model":"up"}'

    @pytest.mark.parametrize("stream", [b"", b',"stream":false', b',"stream":null'])
    def test_stream_options_go_with_a_stream_alone(self, stream: bytes) -> None:
        body = b'{"model":"m","stream_options":{"include_usage":true}' + stream + b"}"
        assert b"stream_options" not in written(body)

    def test_stream_options_of_a_stream_stay(self) -> None:
        body = b'{"model":"up","stream_options":{"include_usage": true},"stream":true}'
        assert written(body) == body

    def test_defaults_fill_missing_fields(self) -> None:
        body = b'{"model":"m","temperature":0.0,"top_p":null}'
        assert json.loads(written(body, temperature=0.7, top_p=0.5, top_k=4)) == {
            "model": "up",
            "temperature": 0.0,
            "top_p": None,
            "top_k": 4,
        }
        assert b"top_k" not in written(body, strip=("top_k",), top_k=4)


def chunk(model: str = "up/model", content: str = "x", **more: Any) -> bytes:
    choices = [{"index": 0, "delta": {"content": content}}]
    value = {"id": "c-1", "object": "chat.completion.chunk", "created": 7, "model": model, "choices": choices, **more}
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


class TestAnswers:
    def test_the_served_name_stands_in_every_event(self) -> None:
        names = ModelNameRewriter("mine")
        for content in ("a", "", "Grüße", '"model":"up/model"', '{"model":"up/model"}'):
            assert names(chunk(content=content)) == chunk("mine", content)

    @given(st.lists(st.text(), min_size=1, max_size=5), st.text(min_size=1), st.text(min_size=1))
    def test_whatever_the_contents_and_the_names(self, contents: list[str], upstream: str, served: str) -> None:
        names = ModelNameRewriter(served)
        for content in contents:
            changed = names(chunk(upstream, content))
            assert json.loads(changed[6:]) == json.loads(chunk(served, content)[6:])

    @given(
        st.lists(st.tuples(st.text() | st.sampled_from(["models", "response"]), JSON), max_size=5), st.integers(0, 5)
    )
    def test_whatever_comes_before_it(self, fields: list[tuple[str, Any]], place: int) -> None:
        """Simple values or objects, with names of models inside of them."""
        body = dict([*fields[:place], ("model", "up"), *fields[place:]])
        body["model"] = "up"
        for sent in (json.dumps(body), json.dumps(body, indent=1, ensure_ascii=False)):
            changed = json.loads(ModelNameRewriter("mine")(sent.encode("utf-8", "surrogatepass")))
            if isinstance(body.get("response"), dict) and isinstance(body["response"].get("model"), str):
                assert "mine" in (changed["model"], changed["response"]["model"])
            else:
                assert changed == {**body, "model": "mine"}

    def test_blanks_are_kept(self) -> None:
        names = ModelNameRewriter("mine")
        data = b'data: {"id": "c", "model" :\t"up" , "choices": [ ]}\r\n\r\n'
        assert names(data) == data.replace(b'"up"', b'"mine"')

    @pytest.mark.parametrize(
        "body",
        [
            b'{"metadata":{"model":"up"},"model":"up","x":1}',
            b'{"object":"model","a":["model",{"model":"up"}],"model":"up"}',
            b'{"choices":[{"message":{"content":"\\"model\\":\\"up\\""}}],"model":"up"}',
        ],
    )
    def test_only_at_the_top(self, body: bytes) -> None:
        reply = json.loads(ModelNameRewriter("mine")(body))
        assert reply == {**json.loads(body), "model": "mine"}

    @pytest.mark.parametrize(("kind", "field"), [("response.created", "response"), ("message_start", "message")])
    def test_typed_events_have_it_in_their_object(self, kind: str, field: str) -> None:
        inner = '{"id":"r","model":"up","tools":[]}'
        data = f'event: {kind}\ndata: {{"type":"{kind}","{field}":{inner}}}\n\n'.encode()
        assert ModelNameRewriter("mine")(data) == data.replace(b'"up"', b'"mine"')

    @pytest.mark.parametrize(
        "data",
        [
            b"data: [DONE]\n\n",
            b'data: {"type":"response.output_text.delta","delta":"a"}\n\n',
            b'data: {"error":{"message":"the model up","param":"model"}}\n\n',
            b'data: {"model":null,"choices":[]}\n\n',
            b'data: {"other":{"model":"up"}}\n\n',
            b'data: {"model"',
        ],
    )
    def test_what_names_no_model_stays(self, data: bytes) -> None:
        assert ModelNameRewriter("mine")(data) == data

    def test_a_name_that_changes_on_the_way(self) -> None:
        """The model name may differ from event to event, and so may the text before it."""
        names = ModelNameRewriter("mine")
        assert names(chunk("one")) == chunk("mine")
        assert names(chunk("one-b")) == chunk("mine")
        assert names(chunk("one", created=8)) == chunk("mine", created=8)

    @pytest.mark.parametrize(
        "part", [b'\\"', b'"model" ', b'"model":"\\', b'"', b'"a', b"{", b'{"model" ', b"\\", b'"model"   ']
    )
    def test_the_work_grows_with_the_size_alone(self, part: bytes) -> None:
        """The time is linear for an event that is not JSON and provokes rescans: quadratic work on these megabytes
        would take hours."""
        data = b'data: "model" "' + part * 500_000
        assert ModelNameRewriter("mine")(data) == data

    def test_the_work_for_many_names_grows_with_their_number_alone(self) -> None:
        data = b'{"a":[]' + b',"model":"mine"' * 500_000 + b"\n"
        assert ModelNameRewriter("mine")(data) == data

    @pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
    @pytest.mark.parametrize("after", [b"", b', "created": 7', b',"a":null,"object":"x y","b":-1.5e3'])
    def test_events_that_name_the_model_last(self, after: bytes, end: bytes) -> None:
        """The same fields follow it in every event."""
        names = ModelNameRewriter('m"')
        sent, expected = (
            [
                b'data: {"choices":[%b],"id":"c", "model": %b%b}' % (content, name, after) + end
                for content in (b"1", b'"\\"model\\":\\"x\\"}"', b'{"a":"]"}', b"[]")
            ]
            for name in (b'"up"', b'"m\\""')
        )
        assert names.rewrite_events(b"".join(sent)) == b"".join(expected)
        assert [names.rewrite_events(each) for each in sent] == expected
        assert [names(each) for each in sent] == expected

    @pytest.mark.parametrize(
        "other",
        [
            b'data: {"model":"a","choices":[],"model":"up","x":1}\n\n',  # the first counts
            b'data: {"choices":["model"],"model":"up","x":1}\n\n',
            b'data: {"choices":[],"model":"up","x":2}\n\n',
            b'data: {"choices":[]}\n\n',
        ],
    )
    def test_events_of_which_one_differs_are_left_to_be_split(self, other: bytes) -> None:
        same = b'data: {"choices":[1],"model":"up","x":1}\n\ndata: {"choices":[2],"model":"up","x":1}\n\n'
        names = ModelNameRewriter("mine")
        assert names.rewrite_events(same) == same.replace(b"up", b"mine")
        assert names.rewrite_events(same + other) is None
        assert names.rewrite_events(other + same) is None
        assert names(other) == ModelNameRewriter("mine")(other)

    def test_a_string_without_end_ends_the_search(self) -> None:
        data = b'{"x":"' + b'\\"' * 3 + b',"model":"up"}'
        assert ModelNameRewriter("mine")(data) == data

    def test_a_served_name_is_written_as_json(self) -> None:
        assert ModelNameRewriter('a"b')(b'{"model":"x"}') == b'{"model":"a\\"b"}'

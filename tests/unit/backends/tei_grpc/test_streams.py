"""A batch as one stream: row order, options, failures, and how it ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import numpy as np
import pytest

from shoal.backends.tei import grpc_link
from shoal.backends.tei.codec import TeiCodec
from shoal.backends.tei.engine import TeiEngine
from shoal.backends.tei.info import Info
from shoal.backends.tei.link import ExpectedShape
from shoal.core.protocols import Token
from shoal.core.recording import RECORD, TaskRecord
from shoal.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    InputRejected,
    InvalidValue,
    ShoalError,
    TransportFailed,
)
from tests.fakes.certificates import CA, SERVER_CERT, SERVER_KEY
from tests.fakes.tei_grpc import FakeTeiGrpc
from tests.fakes.tei_model import CLS, SEP, Script, dense_of, logits_of, sparse_of, tokens_of, word_id
from tests.unit.backends.tei.kit import FakeAdmission, ask, batch, close, until
from tests.unit.backends.tei_grpc.kit import engine_to, link_to

PARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"

WORDS = ["one", "two words", "drei Wörter"]


class TestBatches:
    async def test_rows_are_in_order_and_exact(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        found = await ask(engine, WORDS)
        assert (found.dtype, found.flags.writeable) == (np.dtype(np.float32), True)
        assert np.array_equal(found, np.stack([dense_of(word) for word in WORDS]))
        assert [(call.path, call.inputs) for call in server.calls] == [("/embed", WORDS)]

    async def test_options_are_sent_as_given(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        server.change(prompts='{"query": "ask "}')
        params: Any = {
            "truncate": True,
            "truncation_direction": "left",
            "prompt_name": "query",
            "normalize": False,
            "dimensions": 4,
        }
        found = await ask(engine, ["a b"], **params)
        assert server.calls[0].options == params
        assert np.array_equal(found[0], dense_of("ask a b", normalize=False, dimensions=4))

    async def test_ids_go_as_words(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        """The protocol has no ids: the server decodes them, as its HTTP build does by itself."""
        found = await ask(engine, [[CLS, 5, 6, SEP], "text", [7]])
        assert [(call.path, call.inputs) for call in server.calls] == [
            ("/decode", [[CLS, 5, 6, SEP], [7]]),
            ("/embed", ["w5 w6", "text", "w7"]),
        ]
        assert np.array_equal(found[0], dense_of("w5 w6"))

    async def test_several_outputs_are_several_streams(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        found = await engine.infer(batch(WORDS), ["tokens", "embedding", "token_count"], {}, time.monotonic() + 10)
        assert [call.path for call in server.calls] == ["/embed_all", "/embed"]
        assert server.most_in_flight == 1
        for row, word in zip(found["tokens"], WORDS, strict=True):
            assert np.array_equal(row, tokens_of(word))
        assert found["token_count"].tolist() == [[3], [4], [4]], "each has its own count"

    async def test_sparse_vectors(self) -> None:
        async with FakeTeiGrpc(Script(kind="splade")) as server:
            engine = await engine_to(server)
            assert engine.facts.outputs == ("sparse", "token_count")
            found = await ask(engine, ["a b a", "c"], "sparse", normalize=True)
            assert dict(zip(found[0].indices.tolist(), found[0].values.tolist(), strict=True)) == sparse_of("a b a")
            await close(engine)

    @pytest.mark.parametrize("kind", ["reranker", "classifier"])
    async def test_scores_of_texts_and_pairs(self, kind: Any) -> None:
        """Pairs of many queries share a stream; scores are raw."""
        async with FakeTeiGrpc(Script(kind=kind, labels=11)) as server:
            engine = await engine_to(server)
            items: list[Any] = [("q", "one"), "alone", ("other q", "two")]
            found = await ask(engine, items, "scores")
            assert np.array_equal(found, np.stack([logits_of(item, server.script) for item in items]))
            assert [call.inputs for call in server.calls] == [items]
            assert server.calls[0].options == {"raw_scores": True, "truncate": False}
            await close(engine)

    async def test_more_than_the_server_wants_at_once(self) -> None:
        async with FakeTeiGrpc(Script(max_client_batch_size=2)) as server:
            engine = await engine_to(server)
            assert np.array_equal(await ask(engine, list("abcde")), np.stack([dense_of(text) for text in "abcde"]))
            assert [len(call.inputs) for call in server.calls] == [2, 2, 1]
            await close(engine)

    async def test_somebody_elses_permits_are_waited_for(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        """The server itself waits: a stream is not refused for missing permits."""
        server.change(max_concurrent_requests=1)
        texts = [f"text {at}" for at in range(8)]
        found = await asyncio.gather(*(ask(engine, [text, f"{text} more"]) for text in texts))
        assert server.most_permits == 1
        for rows, text in zip(found, texts, strict=True):
            assert np.array_equal(rows, np.stack([dense_of(text), dense_of(f"{text} more")]))

    async def test_large_messages(self, server: FakeTeiGrpc) -> None:
        """Messages in both directions may exceed gRPC's default limit."""
        server.change(dimension=2**14, max_input_length=2**20)
        engine = await engine_to(server)
        text = "word " * 2**18
        found = await engine.infer(batch([text, "b"]), ["embedding"], {"truncate": True}, time.monotonic() + 30)
        assert np.array_equal(found["embedding"][1], dense_of("b", server.script))
        await close(engine)


class TestFailures:
    @pytest.mark.parametrize(
        ("texts", "kind", "words"),
        [
            (["fine", "poison-item", "fine"], EngineFailed, "the device said no"),
            (["fine", ""], InputRejected, "cannot be empty"),
            (["x " * 600], InputRejected, "less than 512 tokens. Given: 602"),
        ],
    )
    async def test_an_items_error_ends_its_stream(
        self, server: FakeTeiGrpc, engine: TeiEngine, texts: list[str], kind: type[ShoalError], words: str
    ) -> None:
        with pytest.raises(kind, match=words):
            await ask(engine, texts)
        assert engine.ready()
        assert np.array_equal((await ask(engine, ["a"]))[0], dense_of("a"))

    @pytest.mark.parametrize(("bad", "kind"), [("", InputRejected), ("poison-item", EngineFailed)])
    async def test_a_stream_that_ends_while_it_is_written(
        self, engine: TeiEngine, bad: str, kind: type[ShoalError]
    ) -> None:
        """The server's error for the first text counts, not that the others could not be sent."""
        for _ in range(20):
            with pytest.raises(kind, match=r"cannot be empty|said no"):
                await ask(engine, [bad, *["w " * 5000] * 31], truncate=True)

    @pytest.mark.parametrize(
        ("misbehaves", "words"),
        [
            ("short", "1 rows for 2 inputs"),
            ("empty", "0 rows for 2 inputs"),
            ("more", "more rows"),
            ("ragged", "vectors that are empty or of different lengths"),
            ("garbage", "returned an invalid response"),
        ],
    )
    async def test_answers_that_are_none(
        self, server: FakeTeiGrpc, engine: TeiEngine, misbehaves: str, words: str
    ) -> None:
        server.change(misbehaves=misbehaves)
        with pytest.raises(EngineFailed, match=words):
            await ask(engine, ["a", "b"])

    async def test_an_answer_larger_than_its_row(self, server: FakeTeiGrpc) -> None:
        """The answer is refused unread, and its stream is cancelled."""
        link = link_to(server)
        info = await link.info(time.monotonic() + 10)
        server.change(dimension=4096)
        with pytest.raises(EngineFailed, match="more rows or bytes than the limit"):
            await link.rows("embedding", ["a", "b"], {}, time.monotonic() + 10, ExpectedShape(info, 16))
        await link.aclose()

    async def test_all_answers_together(self, server: FakeTeiGrpc, monkeypatch: pytest.MonkeyPatch) -> None:
        link = link_to(server)
        info = await link.info(time.monotonic() + 10)
        monkeypatch.setattr(grpc_link, "MAX_ANSWER_BYTES", 150)
        with pytest.raises(EngineFailed, match="send fewer inputs at once"):
            await link.rows("embedding", ["a", "b"], {}, time.monotonic() + 10, ExpectedShape(info, 16))
        await link.aclose()

    async def test_labels_that_it_did_not_have(self) -> None:
        async with FakeTeiGrpc(Script(kind="classifier")) as server:
            engine = await engine_to(server)
            server.change(misbehaves="labels")
            with pytest.raises(EngineFailed, match="labels other than its model's"):
                await ask(engine, ["a"], "scores")
            await close(engine)

    async def test_rows_of_another_width_take_it_out(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        engine.dimension = 16
        server.change(dimension=15)
        with pytest.raises(EngineFailed, match="vectors of 15 numbers instead of 16: it is a different model"):
            await ask(engine, ["a"])
        assert not engine.ready()

    async def test_a_key_that_is_refused_takes_it_out(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        server.change(api_key="other")
        with pytest.raises(EngineFailed, match="upstream_api_key"):
            await ask(engine, ["a"])
        assert not engine.ready()

    async def test_a_key_is_sent(self) -> None:
        async with FakeTeiGrpc(Script(api_key="sesame")) as server:
            engine = await engine_to(server)
            assert np.array_equal((await ask(engine, ["a"]))[0], dense_of("a"))
            assert {each["authorization"] for each in server.metadata} == {"Bearer sesame"}
            await close(engine)

    async def test_the_trace_in_progress_is_sent_beside_the_key(self) -> None:
        async with FakeTeiGrpc(Script(api_key="sesame")) as server:
            engine = await engine_to(server)
            asked = len(server.metadata)
            RECORD.set(TaskRecord("r", "m", "embed", 1, 0.0, f"{PARENT} a=b"))
            await ask(engine, ["a"])
            RECORD.set(None)
            sent = server.metadata[asked:]
            assert [(each["traceparent"], each["tracestate"]) for each in sent] == [(PARENT, "a=b")]
            assert {each["authorization"] for each in sent} == {"Bearer sesame"}
            await close(engine)

    async def test_dying_in_the_middle_of_a_stream(self, engine: TeiEngine) -> None:
        with pytest.raises(TransportFailed):
            await ask(engine, ["fine", "die-item"])
        assert not engine.ready()


class TestLeaving:
    async def test_a_deadline_ends_the_stream_there(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        server.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await ask(engine, ["a"], seconds=0.2)
        await until(lambda: server.calls[0].aborted and not server.in_flight)
        assert engine.ready(), "one that is slow is not away"
        with pytest.raises(DeadlineExceeded):
            await ask(engine, ["a"], seconds=-1.0)

    async def test_cancelling_ends_the_stream_there(self, server: FakeTeiGrpc, engine: TeiEngine) -> None:
        server.gate.clear()
        pending = asyncio.create_task(ask(engine, ["a", "b"]))
        await server.call()
        pending.cancel()
        (found,) = await asyncio.gather(pending, return_exceptions=True)
        assert isinstance(found, asyncio.CancelledError)
        await until(lambda: server.calls[0].aborted and not server.in_flight)

    async def test_a_link_that_is_closed(self, server: FakeTeiGrpc) -> None:
        """Calls in flight end as a broken connection; closing again, or before any call, has no effect."""
        link = link_to(server)
        info = await link.info(time.monotonic() + 10)
        server.calls.clear()
        server.gate.clear()
        pending = asyncio.create_task(link.rows("embedding", ["a"], {}, time.monotonic() + 10, ExpectedShape(info, 16)))
        await server.call()
        await link.aclose()
        with pytest.raises(TransportFailed, match="closed"):
            await pending
        with pytest.raises(TransportFailed, match="closed"):
            await link.info(time.monotonic() + 10)
        await link.aclose()
        server.gate.set()


class TestCards:
    @pytest.mark.parametrize(
        ("kind", "labels", "expected"),
        [
            ("embedding", 0, ("embedding", ())),
            ("splade", 0, ("splade", ())),
            ("reranker", 1, ("reranker", ("LABEL_0",))),
            ("classifier", 3, ("classifier", ("LABEL_0", "LABEL_1", "LABEL_2"))),
            ("classifier", 1, ("reranker", ("LABEL_0",))),
        ],
    )
    async def test_values_missing_from_the_card_are_probed(
        self, kind: Any, labels: int, expected: tuple[str, tuple[str, ...]]
    ) -> None:
        """The model is probed once: the next check finds the same info."""
        script = Script(kind=kind, labels=labels, model_id="org/name", model_sha="abc", max_input_length=128)
        async with FakeTeiGrpc(script) as server:
            link = link_to(server)
            info = await link.info(time.monotonic() + 10)
            assert (info.kind, info.labels) == expected
            assert (info.model_id, info.revision, info.dtype, info.max_input_length) == ("org/name", "abc", "f32", 128)
            assert (info.max_concurrent_requests, info.max_client_batch_size) == (512, 32)
            assert info.auto_truncate, "the protocol knows none: Shoal's own setting holds"
            assert await link.check_health(10.0) == info
            assert len(server.calls) == 1
            await link.aclose()

    async def test_labels_by_number_before_others_by_name(self) -> None:
        labels = ["b", "LABEL_10", "a", "LABEL_9", "LABEL_x"]
        assert sorted(labels, key=grpc_link._label_order) == ["LABEL_9", "LABEL_10", "LABEL_x", "a", "b"]

    async def test_labels_of_one_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Script, "label_names", property(lambda _: ("same", "same")))
        async with FakeTeiGrpc(Script(kind="classifier")) as server:
            link = link_to(server)
            with pytest.raises(ConfigError, match="the same name"):
                await link.info(time.monotonic() + 10)
            await link.aclose()

    @pytest.mark.parametrize(
        ("question", "misbehaves", "words"),
        [("a", "short", "0 rows"), ("poison-item", "", "said no"), ("", "", "does not report its model: .*empty")],
    )
    async def test_a_model_that_does_not_answer_yet(
        self, server: FakeTeiGrpc, monkeypatch: pytest.MonkeyPatch, question: str, misbehaves: str, words: str
    ) -> None:
        """The model is probed again, as a server that is starting is."""
        link = link_to(server)
        with monkeypatch.context() as patch:
            patch.setattr(grpc_link, "PROBE_TEXT", question)
            server.change(misbehaves=misbehaves)
            with pytest.raises(EngineFailed, match=words):
                await link.info(time.monotonic() + 10)
        server.change(misbehaves="")
        assert (await link.info(time.monotonic() + 10)).kind == "embedding"
        await link.aclose()

    async def test_a_key_that_is_wrong(self, server: FakeTeiGrpc) -> None:
        server.change(api_key="sesame")
        link = link_to(server, key="wrong")
        with pytest.raises(ConfigError, match="upstream_api_key"):
            await link.info(time.monotonic() + 10)
        await link.aclose()

    async def test_a_key_that_no_header_can_carry(self, server: FakeTeiGrpc) -> None:
        for key in ("with space", "schlüssel", "new\nline"):
            with pytest.raises(ConfigError, match="upstream_api_key"):
                link_to(server, key=key)

    async def test_another_server(self, server: FakeTeiGrpc, monkeypatch: pytest.MonkeyPatch) -> None:
        """A gRPC server without this API is refused."""
        monkeypatch.setattr(grpc_link, "INFO", "/other.Info/Info")
        link = link_to(server)
        with pytest.raises(ConfigError, match=r"is not a gRPC server of .* tei\+http://HOST:PORT"):
            await link.info(time.monotonic() + 10)
        await link.aclose()

    async def test_nobody_there(self, server: FakeTeiGrpc) -> None:
        await server.stop()
        link = link_to(server)
        with pytest.raises(TransportFailed, match="not reachable: check its address"):
            await link.info(time.monotonic() + 10)
        await link.aclose()

    async def test_tls(self, threads: None) -> None:
        credentials = grpc.ssl_server_credentials([(SERVER_KEY, SERVER_CERT)])
        async with FakeTeiGrpc(credentials=credentials) as server:
            link = link_to(server, tls=True, roots=CA)
            assert link.base == f"grpcs://{server.target}"
            assert (await link.info(time.monotonic() + 10)).kind == "embedding"
            await link.aclose()
            link = link_to(server, tls=True)
            with pytest.raises(TransportFailed):
                await link.info(time.monotonic() + 10)
            await link.aclose()


class TestTheWatch:
    async def test_a_server_that_goes_and_comes_back(
        self, server: FakeTeiGrpc, engine: TeiEngine, admission: FakeAdmission
    ) -> None:
        """Values that its info lacks are probed again."""
        engine.start()
        await server.stop()
        await until(lambda: not engine.ready())
        assert "not reachable" in engine.reason
        server.change(max_client_batch_size=4)
        await server.start()
        await until(engine.ready)
        assert (admission.calls, engine.reason, engine.facts.max_batch_size) == (1, "", 4)
        assert server.calls[0].inputs == [grpc_link.PROBE_TEXT]
        assert np.array_equal((await ask(engine, ["a"]))[0], dense_of("a"))

    @pytest.mark.parametrize("kind", ["embedding", "reranker"])
    async def test_one_that_is_unhealthy(self, kind: Any, admission: FakeAdmission) -> None:
        """The health of the model's own service counts: the other services never serve."""
        async with FakeTeiGrpc(Script(kind=kind)) as server:
            engine = await engine_to(server, admission)
            engine.start()
            await until(lambda: server.looks > 3)
            assert engine.ready()
            server.change(unhealthy=True)
            await until(lambda: not engine.ready())
            assert "not healthy" in engine.reason
            server.change(unhealthy=False)
            await until(engine.ready)
            await close(engine)

    async def test_one_without_a_health_service(self, server: FakeTeiGrpc) -> None:
        server.healthless = True
        link = link_to(server)
        assert isinstance(await link.check_health(10.0), Info)
        await link.aclose()

    async def test_another_model_is_probed_before_it_serves(
        self, server: FakeTeiGrpc, engine: TeiEngine, admission: FakeAdmission
    ) -> None:
        admission.error = ConfigError("it holds other weights")
        engine.start()
        server.change(model_sha="other")
        await until(lambda: engine.reason == "it holds other weights")
        admission.error = None
        await until(engine.ready)
        assert engine.info.revision == "other"


class TestTokens:
    @pytest.fixture
    def codec(self, engine: TeiEngine) -> TeiCodec:
        return TeiCodec([engine])

    async def test_tokens_with_their_frame(self, server: FakeTeiGrpc, codec: TeiCodec) -> None:
        rows = await codec.tokenize(["für dich", "b"], add_special_tokens=True, prompt_name=None)
        assert rows[0] == [
            Token(CLS, "[CLS]", True, None, None),
            Token(word_id("für"), "für", False, 0, 3),
            Token(word_id("dich"), "dich", False, 4, 8),
            Token(SEP, "[SEP]", True, None, None),
        ]
        (row,) = await codec.tokenize(["a"], add_special_tokens=False, prompt_name=None)
        assert [token.text for token in row] == ["a"]
        assert [len(call.inputs) for call in server.calls] == [2, 1]

    async def test_decoding(self, codec: TeiCodec) -> None:
        assert await codec.decode([[7], [CLS, 8]], skip_special_tokens=True) == ["w7", "w8"]
        assert await codec.decode([[CLS, 5]], skip_special_tokens=False) == ["w101 w5"]

    async def test_what_it_refuses(self, codec: TeiCodec) -> None:
        with pytest.raises(InvalidValue, match="`nobody` but no prompts were found"):
            await codec.tokenize(["a"], add_special_tokens=True, prompt_name="nobody")
        refused: list[list[list[int]]] = [[[]], [[2**32]], [[-1]]]
        for ids in refused:
            with pytest.raises(InvalidValue):
                await codec.decode(ids, skip_special_tokens=True)
        with pytest.raises(InvalidValue, match="cannot be sent"):
            await codec.tokenize(["\ud800"], add_special_tokens=True, prompt_name=None)

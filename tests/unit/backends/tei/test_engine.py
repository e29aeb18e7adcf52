"""A server as an engine: row order, limits and permits, failures, and how it returns to service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from shoal.backends.tei import engine as engine_module
from shoal.backends.tei import http_link
from shoal.backends.tei.engine import SLOTS, TeiEngine
from shoal.errors import (
    ConfigError,
    DeadlineExceeded,
    InputRejected,
    InternalError,
    OutOfMemory,
    Overloaded,
    ShoalError,
    TransportFailed,
    UpstreamFailed,
)
from tests.fakes.tei import FakeTei
from tests.fakes.tei_model import Script, dense_of, ids_of, logits_of, sparse_of, tokens_of
from tests.unit.backends.tei.kit import FakeAdmission, ask, batch, close, engine_of, until

WORDS = ["one", "two words", "drei Wörter"]
ERAS = pytest.mark.parametrize("era", ["1.8", "1.9"])


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the watch poll all the time."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.001)
    monkeypatch.setattr(engine_module, "LOOK_AGAIN_S", 0.001)


@pytest.fixture
async def server() -> AsyncIterator[FakeTei]:
    async with FakeTei() as made:
        yield made


@pytest.fixture
def admission() -> FakeAdmission:
    return FakeAdmission()


@pytest.fixture
async def engine(server: FakeTei, admission: FakeAdmission) -> AsyncIterator[TeiEngine]:
    made = await engine_of(server, admission)
    yield made
    await close(made)


class TestBatches:
    async def test_rows_are_in_order_and_exact(self, server: FakeTei, engine: TeiEngine) -> None:
        found = await ask(engine, WORDS)
        assert found.dtype == np.float32
        assert np.array_equal(found, np.stack([dense_of(word) for word in WORDS]))
        assert (server.calls[0].path, server.calls[0].inputs) == ("/embed", WORDS)

    async def test_options_are_sent_as_given(self, server: FakeTei, engine: TeiEngine) -> None:
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

    async def test_ids_go_as_they_are(self, server: FakeTei, engine: TeiEngine) -> None:
        found = await ask(engine, [[5, 6], "text", [7]])
        assert server.calls[0].inputs == [[5, 6], "text", [7]]
        assert np.array_equal(found[0], dense_of([5, 6]))

    @pytest.mark.parametrize("normalize", [True, False])
    async def test_dimensions_of_a_server_that_does_not_know_them(self, normalize: bool) -> None:
        """The server returns whole vectors: they are truncated and normalized here."""
        async with FakeTei(Script(era="1.8")) as old:
            engine = await engine_of(old)
            found = await ask(engine, ["a"], dimensions=4, normalize=normalize)
            assert np.allclose(found[0], dense_of("a", normalize=normalize, dimensions=4), atol=1e-6)
            await close(engine)

    async def test_several_outputs_are_several_calls(self, server: FakeTei, engine: TeiEngine) -> None:
        """The calls run one after the other: at most one batch is in flight."""
        found = await engine.infer(
            batch(WORDS), ["tokens", "embedding", "token_count"], {"normalize": True}, time.monotonic() + 10
        )
        assert list(found) == ["tokens", "embedding", "token_count"]
        assert [call.path for call in server.calls] == ["/embed_all", "/embed"]
        assert server.most_in_flight == 1
        for row, word in zip(found["tokens"], WORDS, strict=True):
            assert np.array_equal(row, tokens_of(word))
        assert np.array_equal(found["embedding"][1], dense_of(WORDS[1]))

    async def test_sparse_vectors(self) -> None:
        async with FakeTei(Script(kind="splade")) as server:
            engine = await engine_of(server)
            assert engine.facts.outputs == ("sparse", "token_count")
            found = await ask(engine, ["a b a", "c"], "sparse", normalize=True)
            assert dict(zip(found[0].indices.tolist(), found[0].values.tolist(), strict=True)) == sparse_of("a b a")
            assert "normalize" not in server.calls[0].options
            await close(engine)

    @pytest.mark.parametrize("kind", ["reranker", "classifier"])
    async def test_scores_of_texts_and_pairs(self, kind: Any) -> None:
        """Pairs of many queries share a call; scores are raw, in the order of the labels."""
        async with FakeTei(Script(kind=kind)) as server:
            engine = await engine_of(server)
            items: list[Any] = [("q", "one"), "alone", ("other q", "two")]
            found = await ask(engine, items, "scores")
            assert np.array_equal(found, np.stack([logits_of(item, server.script) for item in items]))
            assert server.calls[0].inputs == items
            assert server.calls[0].options == {"raw_scores": True}
            assert engine.facts.inputs == ("text", "pair")
            await close(engine)

    async def test_tokens_are_divided_by_size(self, server: FakeTei, engine: TeiEngine) -> None:
        outputs = await engine.infer(batch(["a b c d", "a b c d", "a"]), ["token_count"], {}, time.monotonic() + 10)
        counts = outputs["token_count"][:, 0].tolist()
        assert sum(counts) == 6 + 6 + 3
        assert counts[0] == counts[1] > counts[2] > 0
        lone = await engine.infer(batch(["a b c"]), ["token_count"], {}, time.monotonic() + 10)
        assert lone["token_count"].tolist() == [[5]]

    async def test_tokens_that_nobody_counts_are_guessed(
        self, engine: TeiEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_link, "TOKENS", "x-not-there")
        outputs = await engine.infer(batch(["a" * 20, [1, 2, 3]]), ["token_count"], {}, time.monotonic() + 10)
        assert outputs["token_count"].tolist() == [[6], [4]]

    async def test_what_it_cannot_give(self, engine: TeiEngine) -> None:
        with pytest.raises(InternalError, match="no output 'scores'"):
            await engine.infer(batch(["a"]), ["scores"], {}, time.monotonic() + 10)


class TestLimits:
    @pytest.mark.parametrize(
        ("slots", "max_batch", "permits", "expected"),
        [(2, 32, 512, (2, 32)), (4, 32, 64, (4, 16)), (4, 8, 3, (3, 1)), (2, 32, 40, (2, 20)), (1, 32, 1, (1, 1))],
    )
    async def test_no_more_inputs_are_in_flight_than_permits(
        self, slots: int, max_batch: int, permits: int, expected: tuple[int, int]
    ) -> None:
        """A permit counts one input, and a missing permit fails the whole call."""
        script = Script(max_client_batch_size=max_batch, max_concurrent_requests=permits, max_batch_tokens=999)
        async with FakeTei(script) as server:
            engine = await engine_of(server, slots=slots)
            facts = engine.facts
            assert (facts.slots, facts.max_batch_size) == expected
            assert facts.slots * facts.max_batch_size <= permits
            assert (facts.max_batch_tokens, facts.pads_batches, facts.parallel) == (999, False, 1)
            await close(engine)

    async def test_two_calls_in_flight_by_default(self, engine: TeiEngine) -> None:
        assert (SLOTS, engine.facts.slots) == (2, 2)

    @ERAS
    async def test_a_server_that_accepts_fewer_than_stated(self, era: str, admission: FakeAdmission) -> None:
        """The refusal states the limit: the batch is split, and the planner makes smaller ones."""
        async with FakeTei(Script(era=era)) as server:
            engine = await engine_of(server, admission)
            server.change(max_client_batch_size=2)
            found = await ask(engine, list("abcde"))
            assert np.array_equal(found, np.stack([dense_of(text) for text in "abcde"]))
            assert [len(call.inputs) for call in server.calls] == [5, 2, 2, 1]
            assert [call.status for call in server.calls] == [422 if era == "1.9" else 413, 200, 200, 200]
            assert engine.facts.max_batch_size == 2
            await close(engine)

    async def test_limits_that_change_hold_at_the_next_look(self, server: FakeTei, engine: TeiEngine) -> None:
        """A new limit applies at the next check and is not a new model."""
        engine.start()
        server.change(max_client_batch_size=7, max_batch_tokens=100)
        await until(lambda: engine.facts.max_batch_size == 7)
        assert engine.facts.max_batch_tokens == 100
        assert engine.ready()


class TestFailures:
    @ERAS
    @pytest.mark.parametrize(
        ("texts", "kind", "words"),
        [
            (["fine", "poison-item"], UpstreamFailed, "the device said no"),
            (["fine", ""], InputRejected, "cannot be empty"),
            (["x " * 600], InputRejected, "less than 512 tokens. Given: 602"),
        ],
    )
    async def test_one_input_fails_its_call(
        self, era: str, texts: list[str], kind: type[ShoalError], words: str
    ) -> None:
        async with FakeTei(Script(era=era)) as server:
            engine = await engine_of(server)
            with pytest.raises(kind, match=words):
                await ask(engine, texts, truncate=False)
            assert engine.ready()
            await close(engine)

    async def test_a_row_that_is_no_number(self, engine: TeiEngine) -> None:
        found = await ask(engine, ["fine", "nan-item"])
        assert np.isnan(found[1]).all()
        assert np.array_equal(found[0], dense_of("fine"))

    async def test_nan_scores_fail_their_call(self) -> None:
        async with FakeTei(Script(kind="reranker")) as server:
            engine = await engine_of(server)
            with pytest.raises(UpstreamFailed, match="score is NaN"):
                await ask(engine, [("q", "a"), ("q", "nan-item")], "scores")
            await close(engine)

    @pytest.mark.parametrize(
        ("misbehaves", "words"),
        [("html", "web page"), ("short", "1 rows for 2 inputs"), ("empty", "0 rows for 2 inputs")],
    )
    async def test_answers_that_are_none(self, server: FakeTei, engine: TeiEngine, misbehaves: str, words: str) -> None:
        server.change(misbehaves=misbehaves)
        with pytest.raises(UpstreamFailed, match=words):
            await ask(engine, ["a", "b"])

    async def test_labels_that_it_did_not_name(self) -> None:
        async with FakeTei(Script(kind="classifier")) as server:
            engine = await engine_of(server)
            server.change(misbehaves="labels")
            with pytest.raises(UpstreamFailed, match=r"labels other than its model's \(LABEL_0, LABEL_1"):
                await ask(engine, ["a"], "scores")
            await close(engine)

    async def test_another_models_permits(self, server: FakeTei, engine: TeiEngine) -> None:
        """If another client holds the permits, the lane waits and sends the batch again."""
        server.change(max_concurrent_requests=1)
        with pytest.raises(Overloaded, match="too busy"):
            await ask(engine, ["a", "b"])
        assert engine.ready()

    async def test_a_body_that_is_too_large(self, server: FakeTei, engine: TeiEngine) -> None:
        """Halves of the batch may fit."""
        server.change(payload_limit=100)
        with pytest.raises(OutOfMemory, match="--payload-limit"):
            await ask(engine, ["x" * 100])

    async def test_a_key_that_is_refused_takes_it_out(self, server: FakeTei, engine: TeiEngine) -> None:
        """No batch is sent until the key is accepted."""
        server.change(api_key="other")
        with pytest.raises(UpstreamFailed, match="upstream_api_key"):
            await ask(engine, ["a"])
        assert not engine.ready()
        assert "upstream_api_key" in engine.reason

    async def test_a_key_is_sent(self) -> None:
        async with FakeTei(Script(api_key="sesame")) as server:
            engine = await engine_of(server)
            assert np.array_equal((await ask(engine, ["a"]))[0], dense_of("a"))
            await close(engine)

    async def test_dying_in_the_middle_of_a_call(self, engine: TeiEngine) -> None:
        with pytest.raises(TransportFailed):
            await ask(engine, ["die-item"])
        assert not engine.ready()


class TestWidth:
    async def test_rows_of_another_width_take_it_out(
        self, server: FakeTei, engine: TeiEngine, admission: FakeAdmission
    ) -> None:
        """A single row of another width ejects the server too."""
        engine.dimension = 16
        assert (await ask(engine, ["a"])).shape == (1, 16)
        server.change(dimension=15)
        with pytest.raises(UpstreamFailed, match="vectors of 15 numbers instead of 16: it is a different model"):
            await ask(engine, ["a"])
        assert not engine.ready()
        assert "instead of 16" in engine.reason
        server.change(dimension=16)
        engine.start()
        await until(engine.ready)
        assert admission.calls == 1

    async def test_cutting_hides_no_other_model(self) -> None:
        """A server without `dimensions` returns whole vectors: another width is another model."""
        async with FakeTei(Script(era="1.8")) as server:
            engine = await engine_of(server)
            engine.dimension = 16
            assert (await ask(engine, ["a"], dimensions=4)).shape == (1, 4)
            server.change(dimension=24)
            with pytest.raises(UpstreamFailed, match="vectors of 24 numbers instead of 16"):
                await ask(engine, ["a"], dimensions=4)
            await close(engine)

    async def test_token_vectors_keep_their_width(self, server: FakeTei, engine: TeiEngine) -> None:
        """Token vectors may differ from the model's dimension; a newly admitted server may have another width."""
        engine.dimension = 8
        assert (await ask(engine, ["a"], "tokens"))[0].shape == (3, 16)
        server.change(dimension=15)
        with pytest.raises(UpstreamFailed, match="vectors of 15 numbers instead of 16"):
            await ask(engine, ["a"], "tokens")
        engine.start()
        await until(engine.ready)
        assert (await ask(engine, ["a"], "tokens"))[0].shape == (3, 15)


class TestLeaving:
    async def test_a_deadline_ends_the_call_there(self, server: FakeTei, engine: TeiEngine) -> None:
        server.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await ask(engine, ["a"], seconds=0.02)
        await until(lambda: server.calls[0].aborted)
        assert engine.ready(), "one that is slow is not away"

    async def test_cancelling_ends_the_call_there(self, server: FakeTei, engine: TeiEngine) -> None:
        server.gate.clear()
        pending = asyncio.create_task(ask(engine, ["a"]))
        await server.call()
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await until(lambda: server.calls[0].aborted and not server.in_flight)

    async def test_closing_waits_for_what_runs(self, server: FakeTei, engine: TeiEngine) -> None:
        server.gate.clear()
        pending = asyncio.create_task(ask(engine, ["a"]))
        await server.call()
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        server.gate.set()
        assert np.array_equal((await pending)[0], dense_of("a"))
        await closing
        await engine.aclose()
        with pytest.raises(TransportFailed, match="closed"):
            await ask(engine, ["a"])


class TestTheWatch:
    async def test_a_server_that_goes_and_comes_back(
        self, server: FakeTei, engine: TeiEngine, admission: FakeAdmission
    ) -> None:
        engine.start()
        await server.stop()
        await until(lambda: not engine.ready())
        assert "not reachable" in engine.reason
        await server.start()
        await until(engine.ready)
        assert (admission.calls, engine.reason) == (1, "")
        assert np.array_equal((await ask(engine, ["a"]))[0], dense_of("a"))

    async def test_one_that_is_unhealthy(self, server: FakeTei, engine: TeiEngine, admission: FakeAdmission) -> None:
        """A server that reports itself unhealthy gets no work meanwhile."""
        engine.start()
        server.change(unhealthy=True)
        await until(lambda: not engine.ready())
        assert "503 (unhealthy)" in engine.reason
        server.change(unhealthy=False)
        await until(engine.ready)
        assert admission.calls == 1

    async def test_another_model_is_probed_before_it_serves(
        self, server: FakeTei, engine: TeiEngine, admission: FakeAdmission
    ) -> None:
        admission.error = ConfigError("it holds other weights")
        engine.start()
        server.change(model_sha="other", max_client_batch_size=4)
        await until(lambda: engine.reason == "it holds other weights")
        assert not engine.ready()
        admission.error = None
        await until(engine.ready)
        assert (engine.info.revision, engine.facts.max_batch_size) == ("other", 4)

    async def test_a_key_that_became_right(self, server: FakeTei, engine: TeiEngine) -> None:
        server.change(api_key="other")
        with pytest.raises(UpstreamFailed):
            await ask(engine, ["a"])
        engine.start()
        await until(lambda: server.looks > 3)
        assert not engine.ready()
        server.change(api_key="")
        await until(engine.ready)

    async def test_a_look_that_is_late_is_forgiven(
        self, server: FakeTei, engine: TeiEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A busy server may answer late; three late answers in a row eject it."""
        monkeypatch.setattr(engine_module, "LOOK_TIMEOUT_S", 0.0)
        engine.start()
        await until(lambda: not engine.ready())
        assert "deadline" in engine.reason
        monkeypatch.undo()
        monkeypatch.setattr(engine_module, "LOOK_AGAIN_S", 0.001)
        await until(engine.ready)

    async def test_a_bug_does_not_end_it(
        self, server: FakeTei, engine: TeiEngine, admission: FakeAdmission, caplog: pytest.LogCaptureFixture
    ) -> None:
        admission.error = ValueError("a bug")
        server.change(model_sha="new")
        engine.start()
        await until(lambda: "a bug" in engine.reason)
        admission.error = None
        await until(engine.ready)
        assert "unexpectedly" in caplog.text


def test_what_the_fake_reads() -> None:
    """The fake's model reads whole texts, so equal rows are never a coincidence."""
    assert len({tuple(ids_of(word)) for word in WORDS}) == len(WORDS)

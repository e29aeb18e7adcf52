"""Models in this process: the Python API over scripted models, from threads and event loops."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import Label, Ranked, Shoal, ShoalError
from shoal.backends.fake.model import MAX_TOKENS, compute_scores, compute_vector, tokenize_item
from shoal.core.similarity import cosines
from shoal.errors import (
    AddressError,
    ConfigError,
    EmptyInput,
    EngineFailed,
    InputRejected,
    InvalidValue,
    ModelNotFound,
    SetupError,
    TooLong,
    Unavailable,
    Unsupported,
    WrongType,
)
from shoal.types import Array, Embedded, VectorKind


@pytest.fixture(autouse=True)
def no_threads_remain() -> Iterator[None]:
    """Every test leaves the number of threads unchanged."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and "shoal" in thread.name]
    for thread in left:
        thread.join(5)  # a thread pool that is shutting down
        assert not thread.is_alive(), thread


def unit(text: str) -> Array:
    vector = compute_vector(tokenize_item(text), 32)
    unit_vector: Array = vector / np.linalg.norm(vector)
    return unit_vector


def units(*texts: str) -> Array:
    return np.stack([unit(text) for text in texts])


class TestEmbed:
    def test_one_row_a_text_in_order(self) -> None:
        """float32, C-contiguous, and owned by the caller: writing to it changes no other answer."""
        with shoal.open("fake:", cache_mb=1) as s:
            for _ in range(2):
                for texts in (["a b"], ["a b", "c", "a b"]):
                    rows = s.embed(texts)
                    assert np.allclose(rows, units(*texts))
                    assert (rows.dtype, rows.shape) == (np.dtype(np.float32), (len(texts), 32))
                    assert rows.flags.c_contiguous
                    assert rows.flags.owndata
                    rows[:] = 0

    def test_options_match_the_task(self) -> None:
        with shoal.open("fake:") as s:
            assert np.array_equal(s.embed(["a"], normalize=False)[0], compute_vector(tokenize_item("a"), 32))
            assert s.embed(["a"], dimensions=5).shape == (1, 5)
            assert np.allclose(s.embed([tokenize_item("a b")]), units("a b"))
            with pytest.raises(TooLong):
                s.embed(["w " * (MAX_TOKENS + 1)], truncate=False)
            with pytest.raises(InvalidValue, match="dimensions"):
                s.embed(["a"], dimensions=99)

    def test_with_outputs_all_results_are_returned(self) -> None:
        """All requested kinds of vectors, tokens and facts."""
        with shoal.open("fake:vectors=sparse") as s:
            rows = s.embed(["a a b", "c"], outputs=["sparse"])
            assert isinstance(rows, Embedded)
            assert [each.values.tolist() for each in rows.sparse] in ([[2, 1], [1]], [[1, 2], [1]])
            assert (rows.tokens, rows.vectors.shape, rows.facts.size) == ([3, 1], (2, 0), 2)
            with pytest.raises(Unsupported, match="multi"):
                s.embed(["a"], outputs=["multi"])

    def test_a_list_of_any_length(self) -> None:
        """It is split and joined in order, beyond a server's limit per request."""
        texts = [f"t{number}" for number in range(3000)]
        with shoal.open("fake:", max_queue_items=700) as s:
            assert np.allclose(s.embed(texts), units(*texts))
            rows = s.embed(texts, outputs=["dense"])
            assert np.allclose(rows.vectors, units(*texts))
            assert (rows.tokens, rows.truncated) == ([1] * 3000, 0)
            assert rows.facts.batches >= 3000 / 64
            rows = s.embed(["w " * (MAX_TOKENS + 1)] * 600, outputs=["dense"])
            assert rows.truncated == 600

    def test_calls_beyond_the_queue_limit_wait(self) -> None:
        """Calls from many threads wait, where a server would refuse them."""
        with shoal.open("fake:", max_queue_items=8) as s, ThreadPoolExecutor(16) as pool:
            calls = [pool.submit(s.embed, [f"x{number}", f"y{number}"]) for number in range(100)]
            for number, call in enumerate(calls):
                assert np.allclose(call.result(), units(f"x{number}", f"y{number}"))

    def test_wrong_arguments(self) -> None:
        with shoal.open("fake:") as s:
            with pytest.raises(WrongType, match=r"texts must be a list.*\[\.\.\.\]"):
                s.embed("a text")
            with pytest.raises(EmptyInput):
                s.embed([])
            with pytest.raises(ModelNotFound):
                s.embed(["a"], model="other")
            with pytest.raises(TypeError):
                s.embed(["a"], wrong=1)  # type: ignore[call-overload]

    def test_a_failure_affects_only_its_call(self) -> None:
        """One poisoned text fails its call at any position; other calls continue."""
        with shoal.open("fake:") as s:
            with pytest.raises(EngineFailed):
                s.embed(["poison-item"])
            with pytest.raises(InputRejected, match="input 1"):
                s.embed(["good", "reject-item"])
            with pytest.raises(EngineFailed):
                s.embed([*(f"t{number}" for number in range(1500)), "poison-item"])
            with pytest.raises(InputRejected, match=r"^input 1500: the engine"):
                s.embed([*(f"t{number}" for number in range(1500)), "reject-item", "good"])
            assert np.allclose(s.embed(["good"]), units("good"))

    @pytest.mark.parametrize(
        ("item", "error", "words"),
        [
            (None, WrongType, r"texts\[1\] must be a text, a list of token ids or an image, not NoneType"),
            (b"a", InvalidValue, "accepts only text"),
            (["a"], WrongType, r"texts\[1\]\[0\] must be an integer, not str"),
            ([1, 1.5], WrongType, r"texts\[1\]\[1\] must be an integer, not float"),
            ([True], WrongType, "not bool"),
            ([np.array(1.0)], WrongType, "not ndarray"),
            ([2**70], InvalidValue, r"texts\[1\]\[0\] is out of range"),
            ("\ud800", InvalidValue, r"texts\[1\] contains half of a surrogate pair"),
        ],
    )
    def test_inputs_that_are_not_texts(self, item: Any, error: type[ShoalError], words: str) -> None:
        """It is refused before it joins a batch, and the error has its position."""
        with shoal.open("fake:") as s:
            with pytest.raises(error, match=words):
                s.embed(["good", item])
            assert s._background.gateway.registry.find("fake").inflight == 0

    def test_token_ids_of_any_kind(self) -> None:
        """Tuples and arrays also work."""
        with shoal.open("fake:") as s:
            ids = tokenize_item("a b")
            for item in (ids, tuple(ids), np.array(ids), [np.int64(each) for each in ids]):
                assert np.allclose(s.embed([item]), units("a b"))  # type: ignore[list-item]
            assert np.allclose(s.embed(np.array([ids, ids])), units("a b", "a b"))  # type: ignore[call-overload]
            assert s.embed(["é", "a"], dimensions=np.int64(4)).shape == (2, 4)  # type: ignore[call-overload]

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"dimensions": 2.0}, WrongType, "dimensions must be an integer, not float"),
            ({"dimensions": True}, WrongType, "dimensions must be an integer, not bool"),
            ({"truncate": "no"}, WrongType, "truncate must be bool or None, not str"),
            ({"normalize": None}, WrongType, "normalize must be bool, not NoneType"),
            ({"prompt_name": 3}, WrongType, "prompt_name must be str or None, not int"),
            ({"model": None}, WrongType, "model must be str"),
            ({"truncation_direction": "LEFT"}, InvalidValue, "truncation_direction is 'LEFT'.*left, right"),
            ({"outputs": "dense"}, WrongType, "outputs must be a list of vector kinds, from"),
            ({"outputs": 3}, WrongType, "outputs must be a list of vector kinds, from"),
            ({"outputs": []}, InvalidValue, r"outputs is \[\]: name one"),
            ({"outputs": ["dense", "thick"]}, InvalidValue, "dense, tokens, sparse, multi"),
        ],
    )
    def test_options_of_the_wrong_kind(self, options: dict[str, Any], error: type[ShoalError], words: str) -> None:
        with shoal.open("fake:") as s, pytest.raises(error, match=words) as caught:
            s.embed(["a"], **options)
        assert caught.value.param in options

    def test_all_vectors_are_the_caller_s_own(self) -> None:
        """This includes cached vectors and duplicates in one call: writing to them changes no other answer."""
        kinds: tuple[VectorKind, ...] = ("dense", "sparse", "multi", "tokens")
        with shoal.open("fake:vectors=dense+sparse+multi+tokens", cache_mb=1) as s:
            first = s.embed(["a b"], outputs=kinds)
            for cached in (0, 2, 2):
                rows = s.embed(["a b", "a b"] if cached else ["c d"], outputs=kinds)
                assert rows.facts.cached == cached
                if cached:
                    assert np.array_equal(rows.multi_vectors[1], first.multi_vectors[0])
                    assert np.array_equal(rows.token_vectors[1], first.token_vectors[0])
                    assert np.array_equal(rows.sparse[1].values, first.sparse[0].values)
                for row in (*rows.multi_vectors[:1], *rows.token_vectors[:1], rows.sparse[0].values, rows.vectors):
                    row[:] = 0
                rows.sparse[0].indices[:] = 0


class TestRerank:
    def test_best_first(self) -> None:
        """Scores as the model returns them, with indices of the given list."""
        texts = ["x", "y z", "w"]
        expected = [float(compute_scores(tokenize_item(("q", text)), 1, raw=False)[0]) for text in texts]
        with shoal.open("fake:labels=1") as s:
            ranking = s.rerank("q", texts)
            assert all(each == Ranked(each.index, expected[each.index], texts[each.index]) for each in ranking)
            assert [each.score for each in ranking] == sorted(expected, reverse=True)
            assert s.rerank("q", texts, top_n=2) == ranking[:2]
            raw = s.rerank("q", texts, raw_scores=True)
            assert [each.index for each in raw] == [each.index for each in ranking]
            assert raw[0].score == compute_scores(tokenize_item(("q", raw[0].text)), 1, raw=True)[0]

    def test_equal_scores_keep_their_order(self) -> None:
        """The first one comes first, also across chunks."""
        with shoal.open("fake:labels=1") as s:
            assert [each.index for each in s.rerank("q", ["same"] * 700)] == list(range(700))

    def test_by_the_vectors_of_a_model_that_embeds(self) -> None:
        with shoal.open("fake:") as s:
            ranking = s.rerank("a b", ["c", "a b", "d"])
            assert ranking[0].index == 1
            assert ranking[0].score == pytest.approx(1.0)
            assert ranking[1].score == pytest.approx(float(cosines(units("a b"), units(ranking[1].text))[0]), abs=1e-6)

    def test_an_instruction_needs_a_model_that_takes_one(self) -> None:
        with shoal.open("fake:labels=1") as s:
            with pytest.raises(Unsupported, match="no place for an instruction"):
                s.rerank("q", ["a"], instruction="find fish")
            with pytest.raises(WrongType, match="instruction"):
                s.rerank("q", ["a"], instruction=5)  # type: ignore[arg-type]
            assert s.rerank("q", ["a"], instruction="") == s.rerank("q", ["a"])
            assert asyncio.run(s.arerank("q", ["a"], instruction="")) == s.rerank("q", ["a"])

    def test_nothing_to_rank(self) -> None:
        with shoal.open("fake:labels=1") as s:
            with pytest.raises(EmptyInput):
                s.rerank("q", [])
            with pytest.raises(WrongType, match="documents must be a list"):
                s.rerank("q", "document")

    def test_top_n(self) -> None:
        """0 means all, as over HTTP; a negative number is refused."""
        with shoal.open("fake:labels=1") as s:
            assert len(s.rerank("q", ["a", "b", "c"], top_n=0)) == 3
            assert len(s.rerank("q", ["a", "b", "c"], top_n=9)) == 3
            with pytest.raises(InvalidValue, match="top_n is -1"):
                s.rerank("q", ["a", "b"], top_n=-1)
            with pytest.raises(WrongType, match="top_n must be an integer"):
                s.rerank("q", ["a", "b"], top_n=1.5)  # type: ignore[arg-type]

    def test_inputs_that_are_not_texts(self) -> None:
        with shoal.open("fake:labels=1") as s:
            with pytest.raises(WrongType, match="query must be a string, not NoneType"):
                s.rerank(None, ["a"])  # type: ignore[arg-type]
            with pytest.raises(WrongType, match=r"documents\[1\] must be a string, not dict"):
                s.rerank("q", ["a", {"text": "b"}])  # type: ignore[list-item]
            with pytest.raises(WrongType, match="raw_scores must be bool"):
                s.rerank("q", ["a"], raw_scores=1)  # type: ignore[arg-type]
            with pytest.raises(WrongType, match="documents must be a list, not int"):
                s.rerank("q", 5)  # type: ignore[arg-type]

    def test_errors_name_the_document_of_the_list(self) -> None:
        """The index counts duplicates and earlier chunks."""
        with shoal.open("fake:") as s:
            with pytest.raises(InputRejected, match=r"^input 600: the engine"):
                s.rerank("q", [*["same"] * 600, "reject-item", "b"])
            with pytest.raises(InputRejected, match=r"^the query: the engine"):
                s.rerank("reject-item", ["a", "b"])


class TestClassify:
    def test_labels_by_descending_score(self) -> None:
        """Texts and pairs; a pair may be a list too."""
        with shoal.open("fake:labels=3") as s:
            classified = s.classify(["a", ("b", "c"), ["b", "c"]])  # type: ignore[list-item]
            for item, labels in zip(["a", ("b", "c"), ("b", "c")], classified, strict=True):
                scores = compute_scores(tokenize_item(item), 3, raw=False)  # type: ignore[arg-type]
                assert labels == sorted(
                    (Label(f"LABEL_{at}", float(score)) for at, score in enumerate(scores)),
                    key=lambda each: -each.score,
                )
            raw = s.classify(["a"], raw_scores=True)[0]
            assert [each.label for each in raw] == [each.label for each in classified[0]]
            assert raw != classified[0]

    def test_inputs_that_are_neither_texts_nor_pairs(self) -> None:
        with shoal.open("fake:labels=3") as s:
            with pytest.raises(WrongType, match=r"inputs\[1\] has 3 texts"):
                s.classify(["a", ("a", "b", "c")])  # type: ignore[list-item]
            with pytest.raises(WrongType, match=r"inputs\[0\]\[1\] must be a string, not NoneType"):
                s.classify([("a", None)])  # type: ignore[list-item]
            with pytest.raises(WrongType, match=r"inputs\[0\] must be a string"):
                s.classify([None])  # type: ignore[list-item]

    def test_without_a_name_the_classifier_is_used(self) -> None:
        """Not the reranker, in any order of the models."""
        with shoal.open("r=fake:labels=1", "c=fake:labels=3") as s:
            assert len(s.classify(["a"])[0]) == 3

    def test_a_model_that_does_not_classify(self) -> None:
        with shoal.open("one=fake:") as s, pytest.raises(Unsupported, match="cannot classify"):
            s.classify(["a"], model="one")

    def test_each_task_finds_its_model(self) -> None:
        """Without a name, among several models."""
        with shoal.open("e=fake:", "c=fake:labels=2") as s:
            assert s.embed(["a"]).shape == (1, 32)
            assert len(s.classify(["a"])[0]) == 2
            assert s.embed(["a"], model="e").shape == (1, 32)


class TestTogether:
    def test_threads_share_batches(self) -> None:
        """64 threads with one text each, on an engine with one call at a time: far fewer calls than texts."""
        start = threading.Barrier(64)

        def call(s: Shoal, number: int) -> Embedded:
            start.wait()
            rows: Embedded = s.embed([f"t{number}"], outputs=["dense"])
            return rows

        with shoal.open("fake:delay_ms=20") as s, ThreadPoolExecutor(64) as pool:
            rows = list(pool.map(call, [s] * 64, range(64)))
        for number, each in enumerate(rows):
            assert np.allclose(each.vectors, units(f"t{number}"))
        assert max(each.facts.size for each in rows) >= 16
        assert len({each.facts.id for each in rows}) <= 16

    def test_loops_and_threads_share_batches(self) -> None:
        """Two event loops and a thread share the batch behind the running one."""

        async def ask(s: Shoal, text: str) -> Embedded:
            rows: Embedded = await s.aembed([text], outputs=["dense"])
            return rows

        def call(s: Shoal, text: str) -> Embedded:
            return s.embed([text], outputs=["dense"])

        with shoal.open("fake:delay_ms=1000") as s, ThreadPoolExecutor(4) as pool:
            pool.submit(call, s, "blocker")
            _wait_until(lambda: s._background.gateway.registry.find("fake").inflight == 1)
            time.sleep(0.02)
            loops = [pool.submit(asyncio.run, ask(s, text)) for text in ("one", "two")]
            thread = pool.submit(call, s, "three")
            rows = [call.result() for call in (*loops, thread)]
        assert {each.facts.size for each in rows} == {3}
        assert len({each.facts.id for each in rows}) == 1


class TestAsync:
    async def test_the_same_answers(self) -> None:
        """From another event loop, without blocking it."""
        async with shoal.open("e=fake:", "r=fake:labels=1", "c=fake:labels=2") as s:
            assert np.allclose(await s.aembed(["a b"]), units("a b"))
            assert (await s.aembed(["a"], outputs=["dense"])).tokens == [1]
            ranked = await s.arerank("q", ["x", "y"], model="r", top_n=1)
            assert ranked == await asyncio.to_thread(s.rerank, "q", ["x", "y"], model="r", top_n=1)
            labels = await s.aclassify([("a", "b")], model="c")
            assert labels == await asyncio.to_thread(s.classify, [("a", "b")], model="c")
            with pytest.raises(EmptyInput):
                await s.aembed([])

    async def test_many_concurrent_calls(self) -> None:
        async with shoal.open("fake:delay_ms=5") as s:
            rows = await asyncio.gather(*(s.aembed([f"t{number}"]) for number in range(200)))
            assert all(np.allclose(each, units(f"t{number}")) for number, each in enumerate(rows))

    async def test_a_call_that_is_cancelled_leaves_the_queue(self) -> None:
        """Its caller gets the cancellation at once, and others do not wait behind it."""
        async with shoal.open("fake:delay_ms=10000") as s:
            call = asyncio.create_task(s.aembed(["a"]))
            lane = s._background.gateway.registry.find("fake").ready_runner()
            await asyncio.to_thread(_wait_until, lambda: _count_inflight(lane) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(_wait_until, lambda: _count_inflight(lane) == 0)

    async def test_calls_wait_for_loading_models(self) -> None:
        """A call that is cancelled while it waits has no effect."""
        s = shoal.open("fake:")
        try:
            early = asyncio.create_task(s.aembed(["early"]))
            await asyncio.sleep(0)
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)
            assert np.allclose(await s.aembed(["a"]), units("a"))
        finally:
            await s.aclose()


def _count_inflight(runner: Any) -> int:
    for each in getattr(runner, "_runners", [runner]):
        if hasattr(each, "lane"):
            return int(each.lane.admission.items)
    raise AssertionError(f"{runner} has no lane")


def _wait_until(true: Callable[[], bool]) -> None:
    """Another thread makes it true."""
    while not true():
        time.sleep(0.005)


class TestLife:
    def test_closing_twice_has_no_effect(self) -> None:
        """Later calls are refused, and closing again has no effect."""
        s = shoal.open("fake:")
        assert s.embed(["a"]).shape == (1, 32)
        s.close()
        s.close()
        with pytest.raises(Unavailable, match="closed"):
            s.embed(["a"])

    def test_a_closed_object_cannot_be_reopened(self) -> None:
        """A closed object cannot be reopened by `with`."""
        s = shoal.open("fake:")
        with s:
            pass
        with pytest.raises(Unavailable, match="closed"):
            s.__enter__()

    def test_use_after_a_fork_is_an_error(self) -> None:
        """The child has none of the threads and would hang; the parent continues, and the child exits by itself."""
        program = (
            "import asyncio, os, sys, shoal\n"
            "async def ask():\n"
            "    await s.aembed(['a'])\n"
            "with shoal.open('fake:') as s:\n"
            "    child = os.fork()\n"
            "    if not child:\n"
            "        for call in (lambda: s.embed(['a']), lambda: asyncio.run(ask()), s.__enter__):\n"
            "            try:\n"
            "                call()\n"
            "            except shoal.ShoalError as error:\n"
            "                print(error, flush=True)\n"
            "        s.close()\n"
            "        sys.exit(0)\n"
            "    assert os.waitpid(child, 0)[1] == 0\n"
            "    assert s.embed(['a']).shape == (1, 32)\n"
        )
        command = [sys.executable, "-c", program]  # newer Pythons warn about a fork in a process with threads
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        message = "this Shoal belongs to the process that opened it: open a new one after the fork\n"
        assert (run.returncode, run.stdout) == (0, message * 3)

    async def test_async_calls_after_close_are_refused(self) -> None:
        s = shoal.open("fake:")
        async with s:
            pass
        with pytest.raises(Unavailable, match="closed"):
            await s.aembed(["a"])

    def test_closing_before_it_is_ready(self) -> None:
        """While models load; the load is abandoned."""
        s = shoal.open("slow=openai+http://127.0.0.1:9#m")
        s.close()
        with pytest.raises(Unavailable, match="closed"):
            s.embed(["a"])

    def test_closing_fails_running_calls(self) -> None:
        """Each ends with a ShoalError, in threads and on loops; none hangs."""

        async def ask(s: Shoal) -> Any:
            return await s.aembed(["b"])

        s = shoal.open("fake:delay_ms=600000")
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(s.embed, ["a"]), pool.submit(asyncio.run, ask(s))]
            s._background.wait_ready()
            lane = s._background.gateway.registry.find("fake").ready_runner()
            _wait_until(lambda: _count_inflight(lane) == 2)
            s.close()
            for call in calls:
                with pytest.raises(Unavailable, match="this Shoal is closed"):
                    call.result()

    def test_a_model_that_cannot_be_loaded(self, tmp_path: Path) -> None:
        """`with` and every call raise the reason; no thread remains."""
        with pytest.raises(SetupError, match="nothing-there"), shoal.open(f"file:{tmp_path}/nothing-there"):
            raise AssertionError("it was opened")
        s = shoal.open(f"file:{tmp_path}/nothing-there")
        for _ in range(2):
            with pytest.raises(SetupError, match="nothing-there"):
                s.embed(["a"])
        s.close()

    async def test_a_model_that_cannot_be_loaded_async(self, tmp_path: Path) -> None:
        with pytest.raises(SetupError, match="nothing-there"):
            async with shoal.open(f"file:{tmp_path}/nothing-there"):
                raise AssertionError("it was opened")

    def test_two_instances_in_one_process(self) -> None:
        with shoal.open("fake:") as one, shoal.open("fake:dimension=8") as two:
            assert (one.embed(["a"]).shape, two.embed(["a"]).shape) == ((1, 32), (1, 8))

    def test_signals_and_logging_are_unchanged(self) -> None:
        """Signals and logging belong to the program."""
        root = logging.getLogger()
        before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), list(root.handlers), root.level)
        own = (list(logging.getLogger("shoal").handlers), logging.getLogger("shoal").level)
        with shoal.open("fake:") as s:
            s.embed(["a"])
            assert before == (
                signal.getsignal(signal.SIGINT),
                signal.getsignal(signal.SIGTERM),
                list(root.handlers),
                root.level,
            )
            assert own == (list(logging.getLogger("shoal").handlers), logging.getLogger("shoal").level)

    def test_a_program_without_close_exits(self) -> None:
        """It ends by itself, without output."""
        program = "import shoal; s = shoal.open('fake:'); assert s.embed(['a']).shape == (1, 32)"
        run = _run_program(program)
        assert (run.returncode, run.stdout, run.stderr) == (0, "", "")

    def test_calls_after_the_main_thread_ended(self) -> None:
        """Other threads continue, but Python starts no new threads: a call that needs one gets an error and does not
        hang.
        """
        program = (
            "import threading, shoal, shoal.errors\n"
            "s = shoal.open('fake:')\n"
            "s.embed(['loaded'])\n"
            "def work():\n"
            "    threading.main_thread().join()\n"
            "    print(s.embed(['short']).shape)\n"
            "    try:\n"
            "        s.embed(['word ' * 1000] * 3)\n"
            "    except shoal.errors.CapacityError as error:\n"
            "        print(error)\n"
            "threading.Thread(target=work).start()\n"
        )
        run = _run_program(program)
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith("(1, 32)\nPython starts no threads after the main thread ends")

    def test_an_interrupt_ends_a_call(self) -> None:
        """Ctrl-C in a waiting call: the program and other calls continue."""
        program = (
            "import os, signal, threading, time, shoal\n"
            "with shoal.open('slow=fake:delay_ms=60000', 'fast=fake:') as s:\n"
            "    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
            "    try:\n"
            "        s.embed(['a'], model='slow')\n"
            "    except KeyboardInterrupt:\n"
            "        assert s.embed(['a'], model='fast').shape == (1, 32)\n"
            "        print('went on')\n"
        )
        run = _run_program(program)
        assert (run.returncode, run.stdout, run.stderr) == (0, "went on\n", "")


def _run_program(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


class TestSettings:
    def test_environment_and_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Arguments override variables, and variables may name the models."""
        monkeypatch.setenv("SHOAL_MODELS", "fake:dimension=8")
        monkeypatch.setenv("SHOAL_CACHE_MB", "3")
        with shoal.open(max_batch_size=5) as s:
            assert s.embed(["a"]).shape == (1, 8)
            loaded = s._background._loaded.settings
            assert (loaded.cache_mb, loaded.max_batch_size) == (3, 5)
        with shoal.open("fake:", cache_mb=0) as s:
            assert s._background._loaded.settings.cache_mb == 0

    def test_a_named_settings_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is read; other settings files are ignored."""
        file = tmp_path / "shoal.toml"
        file.write_text('[models."m"]\nbackends = ["fake:dimension=8"]\naliases = ["other"]\n')
        monkeypatch.chdir(tmp_path)
        with shoal.open(config=file) as s:
            assert s.embed(["a"], model="other").shape == (1, 8)
        with shoal.open("fake:") as s, pytest.raises(ModelNotFound):
            s.embed(["a"], model="other")

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"max_batch_sise": 1}, "max_batch_sise is not a setting: did you mean max_batch_size"),
            ({"cache_mb": "x"}, "^cache_mb: must be a whole number of at least 0, got 'x'"),
            ({"zzz": 1}, "see docs/settings.md"),
            ({"timeout": 5}, "timeout is not a setting: see docs/settings.md"),
            ({"port": 80}, "a setting of the server, which"),
            ({"log_level": "debug"}, "a setting of the server, which"),
            ({"max_batch_size": 0}, "must be a whole number of at least 1"),
            ({"max_batch_size": "many"}, "must be a whole number"),
            ({"config": "/nowhere/shoal.toml"}, "cannot be read"),
        ],
    )
    def test_wrong_arguments_are_refused_at_once(self, settings: dict[str, Any], words: str) -> None:
        """Before anything is started."""
        with pytest.raises(ConfigError, match=words):
            shoal.open("fake:", **settings)

    def test_a_wrong_address_is_refused_at_once(self) -> None:
        with pytest.raises(AddressError):
            shoal.open("nothing://x")
        with pytest.raises(SetupError, match="unknown option"), shoal.open("fake:no=1"):
            raise AssertionError("it was opened")

    @pytest.mark.parametrize(
        ("address", "words"),
        [(Path("/models/m"), "not PosixPath: for a folder, use file:PATH"), (["fake:"], "as separate arguments")],
    )
    def test_an_address_must_be_a_string(self, address: Any, words: str) -> None:
        """Another type is the error of an invalid address."""
        with pytest.raises(AddressError, match=words):
            shoal.open(address)


class TestTheModule:
    def test_the_import_is_lazy(self) -> None:
        """numpy, asyncio and the API are imported on first use."""
        program = (
            "import sys; import shoal\n"
            "assert not {'numpy', 'asyncio', 'shoal.python.api', 'msgspec'} & set(sys.modules)\n"
            "assert shoal.__version__ and shoal.ShoalError.__name__ == 'ShoalError'\n"
            "assert callable(shoal.open) and 'shoal.python.api' in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=30)

    def test_exports(self) -> None:
        for name in shoal.__all__:
            assert getattr(shoal, name) is not None
        assert issubclass(SetupError, ShoalError)
        with pytest.raises(AttributeError, match="nothing_such"):
            shoal.nothing_such  # noqa: B018

    @pytest.mark.parametrize("name", ["embed", "rerank", "classify", "rank", "chat", "generate"])
    def test_sync_and_async_take_the_same_arguments(self, name: str) -> None:
        """The asynchronous method of each differs only by its name."""
        one, other = getattr(Shoal, name), getattr(Shoal, f"a{name}")
        assert inspect.signature(one).parameters == inspect.signature(other).parameters
        assert inspect.iscoroutinefunction(other)

"""Tokenizing in a front: which tasks it takes, and which it leaves to the model process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.app import front_tokenizers
from shoal.app.front_tokenizers import MAX_TOKENS, FrontTokenizers, TokenizerSource, describe_tokenizer
from shoal.backends.fake.model import FakeEngine, FakeScript
from shoal.core.lane_runner import LaneRunner
from shoal.core.lifecycle.states import State
from shoal.core.protocols import ModelFacts
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.threads import Threads
from shoal.pipelines.text.base import TokenizedItem
from shoal.pipelines.text.pairs import PairPipeline
from shoal.pipelines.text.tokens import TextPipeline
from shoal.types import Classify, Embed, Image, Rerank
from shoal.workers.messages import ModelState
from tests.unit.core.lanes import make_lane
from tests.unit.core.runners import Embedder
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.text.test_pairing import bert
from tests.unit.pipelines.text.test_pairs import scoring
from tests.unit.pipelines.tiny_tokenizers import spec
from tests.unit.workers.kit import build_model, until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_tokenizers.save(bert(), tmp_path)


@pytest.fixture
def pipeline(folder: Path) -> TextPipeline:
    return TextPipeline(folder, spec(prompts={"query": "a "}), truncate=True)


@pytest.fixture
def replaced(folder: Path) -> TextPipeline:
    return TextPipeline(folder, spec(max_tokens=9), truncate=True)


@pytest.fixture
def ranker(folder: Path) -> PairPipeline:
    return PairPipeline(folder, scoring(), truncate=True)


@pytest.fixture
async def tokenizers() -> AsyncIterator[FrontTokenizers]:
    threads = Threads("tokenize", 1)
    made = FrontTokenizers(threads)
    yield made
    await made.aclose()
    threads.close()


def source(pipeline: TextPipeline | PairPipeline) -> bytes:
    return msgspec.msgpack.encode(TokenizerSource(pipeline.tokenizer_id, str(pipeline.folder), pipeline.spec))


def state(tokenizer: bytes, name: str = "m", loaded: State = "ready", is_sleeping: bool = False) -> ModelState:
    return ModelState(
        name=name,
        aliases=(),
        default_for=(),
        created=0,
        state=loaded,
        note="",
        is_sleeping=is_sleeping,
        required=True,
        usable=True,
        facts=None,
        error=None,
        tokenizer=tokenizer,
    )


async def open_for(tokenizers: FrontTokenizers, pipeline: TextPipeline | PairPipeline) -> None:
    tokenizers.update([state(source(pipeline))])
    kind = "embed" if isinstance(pipeline, TextPipeline) else "classify"
    task: Any = Embed(model="m", inputs=["a"]) if kind == "embed" else Classify(model="m", inputs=["a"])
    async with asyncio.timeout(30):
        while (await tokenizers.tokenize("m", task)).tokenized is None:  # noqa: ASYNC110 - opening has no event
            await asyncio.sleep(0.001)


async def test_a_model_describes_the_tokenizer_of_its_pipeline(folder: Path, pipeline: TextPipeline) -> None:
    """Models without such a pipeline, or without a runner, describe nothing."""
    lane = Lane(pipeline, [FakeEngine(FakeScript(), "e")], LaneOptions(model="m"), threads=Threads("t", 1))
    runner: Any = LaneRunner(lane, ModelFacts(source="s", backend="b", tasks=("embed",)))
    assert describe_tokenizer(build_model(runner)) == source(pipeline)
    runner = LaneRunner(make_lane(FakeScript()), ModelFacts(source="s", backend="b", tasks=("embed",)))
    assert describe_tokenizer(build_model(runner)) == b""
    assert describe_tokenizer(build_model(Embedder())) == b""
    assert describe_tokenizer(build_model()) == b""


async def test_large_tokenizers_are_left_to_the_model_process(
    folder: Path, pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening one stops the event loop of a front."""
    lane = Lane(pipeline, [FakeEngine(FakeScript(), "e")], LaneOptions(model="m"), threads=Threads("t", 1))
    runner: Any = LaneRunner(lane, ModelFacts(source="s", backend="b", tasks=("embed",)))
    model = build_model(runner)
    size = len((folder / "tokenizer.json").read_bytes())
    monkeypatch.setattr(front_tokenizers, "MAX_FILE_BYTES", size)
    assert describe_tokenizer(model) == source(pipeline)
    monkeypatch.setattr(front_tokenizers, "MAX_FILE_BYTES", size - 1)
    assert describe_tokenizer(model) == b""


async def test_texts_are_tokenized_as_the_pipeline_does(tokenizers: FrontTokenizers, pipeline: TextPipeline) -> None:
    """Token ids among them stay; the time is told."""
    await open_for(tokenizers, pipeline)
    task = Embed(model="m", inputs=["a b", [5, 6]], input_type="query")
    tokenized = (await tokenizers.tokenize("m", task)).tokenized
    assert tokenized is not None
    assert tokenized.tokenizer == pipeline.tokenizer_id
    assert tokenized.seconds > 0
    assert tokenized.items == pipeline.tokenize(task)
    first, second = pipeline.unpack_tokens(tokenized.items, task.inputs)
    assert isinstance(first, TokenizedItem)
    assert second == [5, 6]


@pytest.mark.parametrize(
    "task",
    [
        Embed(model="m", inputs=[]),
        Embed(model="m", inputs=[[5, 6]]),
        Embed(model="m", inputs=["a", Image(data=b"")]),
        Embed(model="m", inputs=["a"], prompt_name="nobody"),
        Embed(model="m", inputs=["a"], outputs=("sparse",)),
        Embed(model="m", inputs=["a" * 3 * MAX_TOKENS]),
        Embed(model="m", inputs=["a b c d e f" * 10] * MAX_TOKENS),
        Classify(model="m", inputs=["a"]),
        Rerank(model="m", queries=["a"], documents=["a"]),
    ],
    ids=lambda task: repr(task)[:60],
)
async def test_what_a_front_does_not_tokenize_goes_as_it_is(
    tokenizers: FrontTokenizers, pipeline: TextPipeline, task: Any
) -> None:
    """Nothing is raised: it is the model process that rejects a task."""
    await open_for(tokenizers, pipeline)
    assert await tokenizers.tokenize("m", task) is task
    assert (await tokenizers.tokenize("other", Embed(model="other", inputs=["a"]))).tokenized is None


async def test_pairs_are_tokenized_unless_the_task_is_wrong(tokenizers: FrontTokenizers, ranker: PairPipeline) -> None:
    """An incomplete task, and an instruction that the model does not take, are left alone."""
    await open_for(tokenizers, ranker)
    fine = Rerank(model="m", queries=["a"], documents=["a", "b"])
    tokenized = (await tokenizers.tokenize("m", fine)).tokenized
    assert tokenized is not None
    assert tokenized.items == ranker.tokenize(fine)
    for task in (
        Rerank(model="m", queries=["a", "b"], documents=["a", "b", "c"]),
        Rerank(model="m", queries=["a"], documents=["a"], instruction="b"),
        Rerank(model="m", queries=["a"], documents=["a"], max_document_tokens=0),
        Embed(model="m", inputs=["a"]),
    ):
        assert await tokenizers.tokenize("m", task) is task


async def test_a_large_task_takes_a_thread_and_no_task_waits_for_it(
    tokenizers: FrontTokenizers, pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the thread works, short tasks are tokenized, and large ones go as they are."""
    await open_for(tokenizers, pipeline)
    go_on, tokenize = threading.Event(), front_tokenizers._tokenize
    main = threading.current_thread()

    def wait(*arguments: Any) -> Any:
        if threading.current_thread() is not main:
            go_on.wait(30)
        return tokenize(*arguments)

    monkeypatch.setattr(front_tokenizers, "_tokenize", wait)
    large = Embed(model="m", inputs=["a b c d e f " * 8] * 100)
    first = asyncio.create_task(tokenizers.tokenize("m", large))
    await asyncio.sleep(0)
    assert await tokenizers.tokenize("m", large) is large
    assert (await tokenizers.tokenize("m", Embed(model="m", inputs=["a"]))).tokenized is not None
    go_on.set()
    assert (await first).tokenized is not None
    await until(lambda: not tokenizers._working)
    assert (await tokenizers.tokenize("m", large)).tokenized is not None


async def test_no_task_waits_for_the_thread_of_a_client_that_left(
    tokenizers: FrontTokenizers, pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_for(tokenizers, pipeline)
    go_on, tokenize = threading.Event(), front_tokenizers._tokenize
    monkeypatch.setattr(front_tokenizers, "_tokenize", lambda *arguments: (go_on.wait(30), tokenize(*arguments))[1])
    large = Embed(model="m", inputs=["a b c d e f " * 8] * 100)
    first = asyncio.create_task(tokenizers.tokenize("m", large))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    try:
        async with asyncio.timeout(5):
            assert await tokenizers.tokenize("m", large) is large
    finally:
        go_on.set()


async def test_no_task_waits_until_another_tokenizer_is_open(
    tokenizers: FrontTokenizers, pipeline: TextPipeline, replaced: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody needs that one any more by then."""
    await open_for(tokenizers, pipeline)
    go_on, opens = threading.Event(), front_tokenizers._open_pipeline
    monkeypatch.setattr(front_tokenizers, "_open_pipeline", lambda described: (go_on.wait(30), opens(described))[1])
    large = Embed(model="m", inputs=["a b c d e f " * 8] * 100)
    try:
        for others in ([state(source(replaced), "other")], []):
            tokenizers.update([state(source(pipeline)), *others])
            await asyncio.sleep(0.01)
            async with asyncio.timeout(5):
                assert await tokenizers.tokenize("m", large) is large
    finally:
        go_on.set()
    await until(lambda: not tokenizers._working)
    assert (await tokenizers.tokenize("m", large)).tokenized is not None


async def test_a_model_that_is_gone_or_replaced_has_no_old_tokenizer(
    tokenizers: FrontTokenizers, pipeline: TextPipeline, replaced: TextPipeline
) -> None:
    """From the update on, the old one is not used; the new one is opened."""
    task = Embed(model="m", inputs=["a"])
    await open_for(tokenizers, pipeline)
    tokenizers.update([state(source(replaced))])
    assert await tokenizers.tokenize("m", task) is task
    await open_for(tokenizers, replaced)
    tokenized = (await tokenizers.tokenize("m", task)).tokenized
    assert tokenized is not None
    assert tokenized.tokenizer == replaced.tokenizer_id
    tokenizers.update([])
    assert await tokenizers.tokenize("m", task) is task


async def test_a_sleeping_model_keeps_its_tokenizer(
    tokenizers: FrontTokenizers, pipeline: TextPipeline, replaced: TextPipeline
) -> None:
    """Opening it at each wake-up would stop the event loop each time. One that wakes with another has that one."""
    await open_for(tokenizers, pipeline)
    opened = tokenizers._pipelines[source(pipeline)]
    for loaded in ("unloading", "unloaded", "loading"):
        tokenizers.update([state(b"", loaded=loaded, is_sleeping=True)])
    tokenizers.update([state(source(pipeline))])
    assert tokenizers._pipelines[source(pipeline)] is opened
    tokenizers.update([state(b"", loaded="unloaded", is_sleeping=True)])
    await open_for(tokenizers, replaced)
    assert list(tokenizers._pipelines) == [source(replaced)]


async def test_files_that_are_not_the_described_ones_are_not_used(
    tokenizers: FrontTokenizers, pipeline: TextPipeline, folder: Path
) -> None:
    """Files that changed behind the model process, or are gone."""
    described = source(pipeline)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    for _ in range(2):
        tokenizers.update([state(described)])
        await asyncio.gather(*tokenizers._opening.values())
        task = Embed(model="m", inputs=["a"])
        assert await tokenizers.tokenize("m", task) is task
        tokenizers.update([])
        (folder / "tokenizer.json").unlink(missing_ok=True)


async def test_a_bug_leaves_a_task_as_it_is(
    tokenizers: FrontTokenizers, pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged; the model process tokenizes."""
    await open_for(tokenizers, pipeline)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(front_tokenizers, "_tokenize", fail)
    task = Embed(model="m", inputs=["a"])
    assert await tokenizers.tokenize("m", task) is task

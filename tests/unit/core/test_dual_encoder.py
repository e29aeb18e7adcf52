"""The runner over two lanes: inputs of both kinds come back in order, whatever one lane does."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from shoal.backends.fake.model import FakeScript, compute_vector, tokenize_item
from shoal.core.dual_encoder import DualEncoderRunner
from shoal.core.protocols import ModelFacts
from shoal.errors import EngineFailed, InputRejected, InternalError, InvalidValue, ShoalError, Unsupported
from shoal.types import Classify, Embed, Embedded, Generate, Image, Item, Modality, Rerank
from tests.unit.core.conftest import Run
from tests.unit.core.lanes import context, engine, make_lane

FACTS = ModelFacts(source="f", backend="fake", tasks=("embed",), dimension=32, modalities=("text", "image"))
CAT, DOG = Image(b"cat"), Image(b"dog")


def runner(text: FakeScript | None = None, image: FakeScript | None = None) -> DualEncoderRunner:
    scripts: dict[Modality, FakeScript | None] = {"text": text, "image": image}
    return DualEncoderRunner({name: make_lane(script) for name, script in scripts.items() if script is not None}, FACTS)


def both(**image: float) -> DualEncoderRunner:
    return runner(FakeScript(delay_ms=5), FakeScript(delay_ms=5, **image))  # type: ignore[arg-type]


def embed_task(*inputs: Item, **fields: object) -> Embed:
    return Embed(model="m", inputs=list(inputs), normalize=False, **fields)  # type: ignore[arg-type]


async def found(towers: DualEncoderRunner, task: Embed) -> Embedded:
    answer = await towers.run(task, context())
    assert isinstance(answer, Embedded)
    return answer


def test_vectors_come_back_in_the_order_of_the_inputs(virtual: Run[None]) -> None:
    """Both lanes work at once, and their facts are merged into one answer."""

    async def main() -> None:
        towers = both()
        inputs: list[Item] = ["a b", CAT, "c", DOG, [7, 8]]
        started = asyncio.get_running_loop().time()
        answer = await found(towers, embed_task(*inputs))
        assert asyncio.get_running_loop().time() - started == pytest.approx(0.005, abs=0.001)
        expected = np.stack([compute_vector(tokenize_item(item), 32) for item in inputs])
        assert np.array_equal(answer.vectors, expected)
        assert answer.tokens == [2, 1, 1, 1, 2]
        assert (answer.facts.size, answer.facts.batches, answer.space) == (3, 2, "s")
        assert engine(towers.lanes["text"]).batches[0][0] == 3
        assert engine(towers.lanes["image"]).batches[0][0] == 2
        await towers.aclose()

    virtual(main)


@pytest.mark.parametrize(("inputs", "lane"), [([CAT, DOG], "image"), (["a"], "text")])
def test_inputs_of_one_kind_are_one_lanes(virtual: Run[None], inputs: list[Item], lane: Modality) -> None:
    """Inputs of one kind go to one lane unchanged; the other lane is not called."""

    async def main() -> None:
        towers = both()
        assert (await found(towers, embed_task(*inputs))).vectors.shape == (len(inputs), 32)
        other: Modality = "text" if lane == "image" else "image"
        assert not engine(towers.lanes[other]).batches
        await towers.aclose()

    virtual(main)


def test_text_options_do_not_apply_to_images(virtual: Run[None]) -> None:
    """Prompt, role and truncation apply to the texts, not to the images beside them."""

    async def main() -> None:
        towers = both()
        seen: dict[str, Embed] = {}
        for name, lane in towers.lanes.items():
            lane.pipeline.check = lambda task, name=name: seen.setdefault(name, task)  # type: ignore[method-assign, assignment, misc]
        await found(towers, embed_task("a", CAT, prompt_name="p", input_type="query", truncate=True, dimensions=4))
        text, image = seen["text"], seen["image"]
        assert (text.prompt_name, text.input_type, text.truncate, text.dimensions) == ("p", "query", True, 4)
        assert (image.prompt_name, image.input_type, image.truncate, image.dimensions) == (None, None, None, 4)
        await towers.aclose()

    virtual(main)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["a", CAT, "reject-item"], "input 2: the engine refused an input"),
        ([CAT, "reject-item"], "input 1: the engine refused an input"),
        ([CAT, DOG, [0], "a"], "input 2: token ids must be between 1 and 2147483647"),
        ([CAT, DOG, [0]], "input 2: token ids must be between 1 and 2147483647"),
    ],
)
def test_errors_name_the_input_of_the_whole_request(virtual: Run[None], inputs: list[Item], message: str) -> None:
    """A lane counts only its own inputs, and gives no index for a single one."""

    async def main() -> None:
        towers = both()
        with pytest.raises(ShoalError) as caught:
            await found(towers, embed_task(*inputs))
        assert caught.value.message == message
        assert isinstance(caught.value, InputRejected | InvalidValue)
        await towers.aclose()

    virtual(main)


def test_errors_of_the_request_name_no_input(virtual: Run[None]) -> None:
    """An error of the whole request names no input, even if a lane has only one."""

    async def main() -> None:
        towers = both()
        with pytest.raises(InvalidValue, match=r"^dimensions must be between"):
            await found(towers, embed_task("a", CAT, dimensions=99))
        with pytest.raises(EngineFailed, match=r"^the engine failed without a reason"):
            await found(towers, embed_task("poison-item", CAT))
        await towers.aclose()

    virtual(main)


def test_one_lane_that_fails_ends_the_others_work(virtual: Run[None]) -> None:
    """A failed lane cancels the other one, as a caller that leaves does."""

    async def main() -> None:
        towers = runner(FakeScript(), FakeScript(delay_ms=1000))
        with pytest.raises(InputRejected):
            await found(towers, embed_task("reject-item", CAT))
        assert engine(towers.lanes["image"]).cancelled == 1
        leaving = asyncio.ensure_future(found(towers, embed_task("a", DOG)))
        await asyncio.sleep(0.01)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert engine(towers.lanes["image"]).cancelled == 2
        await towers.aclose()

    virtual(main)


def test_one_tower_alone(virtual: Run[None]) -> None:
    """A runner with one tower serves its inputs; other inputs are refused by the gateway, and a bug here."""

    async def main() -> None:
        towers = runner(image=FakeScript())
        assert (await found(towers, embed_task(CAT))).tokens == [1]
        with pytest.raises(InternalError, match="does not accept text"):
            await found(towers, embed_task("a"))
        await towers.aclose()

    virtual(main)


def test_other_tasks(virtual: Run[None]) -> None:
    """Pairs are texts, a classifier reads one kind, and generation is unsupported."""

    async def main() -> None:
        towers = both()
        with pytest.raises(Unsupported, match="send them in separate requests"):
            await towers.run(Classify(model="m", inputs=["a", CAT]), context())
        assert engine(towers.lanes["text"]).ready()
        await towers.run(Rerank(model="m", queries=["q"], documents=["d"]), context())
        assert len(engine(towers.lanes["text"]).batches) == 1
        with pytest.raises(Unsupported, match="images; it does not generate text"):
            towers.stream(Generate(model="m", prompts=["x"]), context())
        await towers.aclose()

    virtual(main)


def test_it_is_ready_where_both_are(virtual: Run[None]) -> None:
    """The runner is ready if both lanes are, breaks once if either does, and closes both."""

    async def main() -> None:
        towers = both()
        broken: list[ShoalError] = []
        towers.when_broken(broken.append)
        assert towers.ready()
        assert towers.facts is FACTS
        for number, lane in enumerate(towers.lanes.values()):
            lane._fail_lane(RuntimeError(f"bug {number}"))
        assert len(broken) == 1
        assert not towers.ready()
        await towers.aclose()
        assert not any(engine(lane).ready() for lane in towers.lanes.values())

    virtual(main)

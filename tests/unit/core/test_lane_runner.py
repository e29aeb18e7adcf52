from __future__ import annotations

import pytest

from shoal.backends.fake.model import FakeScript
from shoal.core.lane_runner import LaneRunner
from shoal.core.protocols import TextCodec
from shoal.errors import Unsupported
from shoal.types import Generate
from tests.unit.core.conftest import Run
from tests.unit.core.lanes import context, embed, engine, make_lane, right
from tests.unit.core.runners import Codec, Embedder

FACTS = Embedder().facts


def test_embeds_through_its_lane(virtual: Run[None]) -> None:
    """The runner keeps its facts; readiness and closing are the lane's."""

    async def main() -> None:
        lane = make_lane(FakeScript(delay_ms=1))
        runner = LaneRunner(lane, FACTS)
        assert runner.facts is FACTS
        assert runner.ready()
        assert right(await runner.run(embed("a b"), context()), ["a b"])
        await runner.aclose()
        assert not runner.ready()
        assert not engine(lane).ready()

    virtual(main)


def test_does_not_generate(virtual: Run[None]) -> None:
    """Generation is refused at the call, with the model's name."""

    async def main() -> None:
        with pytest.raises(Unsupported, match="it can: embed") as caught:
            LaneRunner(make_lane(FakeScript()), FACTS).stream(Generate(model="m", prompts=["x"]), context())
        assert caught.value.param == "model"

    virtual(main)


def test_shows_the_tokenizer_that_it_was_given(virtual: Run[None]) -> None:
    """Arguments and answers pass unchanged; without a codec both calls are unsupported."""

    async def main() -> None:
        lane = make_lane(FakeScript())
        shown: TextCodec = LaneRunner(lane, FACTS, Codec())
        tokens = await shown.tokenize(["ab", "c"], add_special_tokens=True, prompt_name=">")
        assert [[token.text for token in row] for row in tokens] == [[">", "a", "b"], [">", "c"]]
        assert tokens[0][0].special
        assert not (await shown.tokenize(["a"], add_special_tokens=False, prompt_name=None))[0][0].special
        assert await shown.decode([[97, 98]], skip_special_tokens=True) == ["ab"]
        assert await shown.decode([[97]], skip_special_tokens=False) == ["a$"]
        hidden = LaneRunner(lane, FACTS)
        with pytest.raises(Unsupported, match="does not expose"):
            await hidden.tokenize(["a"], add_special_tokens=True, prompt_name=None)
        with pytest.raises(Unsupported, match="does not expose"):
            await hidden.decode([[1]], skip_special_tokens=True)

    virtual(main)

"""Task options are computed once for all tasks that share them."""

import pytest

from shoal.errors import InvalidValue
from shoal.pipelines.text.options_cache import KNOWN_NAME, MAX_CACHED_OPTIONS, OptionsCache
from shoal.types import BatchTask, Embed


class Worker:
    """Computes the name of a prompt and records the task that needed it."""

    def __init__(self) -> None:
        self.tasks: list[Embed] = []

    def __call__(self, task: Embed) -> str:
        self.tasks.append(task)
        if task.prompt_name == "bad":
            raise InvalidValue("no such prompt", param="prompt_name")
        return f"{task.prompt_name} {task.dimensions}"


def embed(*inputs: str, model: str = "m", prompt_name: str | None = None, dimensions: int | None = None) -> Embed:
    return Embed(model=model, inputs=list(inputs), prompt_name=prompt_name, dimensions=dimensions)


def test_inputs_and_names_of_models_make_no_difference() -> None:
    known: OptionsCache[str] = OptionsCache()
    worker = Worker()
    answers = [known.get_or_compute(task, worker) for task in (embed("a"), embed("b", "c"), embed("a", model="alias"))]
    assert answers == ["None None"] * 3
    assert len(worker.tasks) == 1


def test_every_option_does() -> None:
    known: OptionsCache[str] = OptionsCache()
    worker = Worker()
    tasks = [embed("a"), embed("a", prompt_name="q"), embed("a", dimensions=2), embed("a", prompt_name="q")]
    assert [known.get_or_compute(task, worker) for task in tasks] == ["None None", "q None", "None 2", "q None"]
    assert len(worker.tasks) == 3


def test_refusals_are_not_cached() -> None:
    known: OptionsCache[str] = OptionsCache()
    worker = Worker()
    for _ in range(2):
        with pytest.raises(InvalidValue, match="no such prompt"):
            known.get_or_compute(embed("a", prompt_name="bad"), worker)
    assert len(worker.tasks) == 2


def test_threads_that_meet_do_not_unbind_it() -> None:
    """The limit holds when one thread fills the cache while another, which just cleared it, adds an entry."""

    class Raced(dict[BatchTask, str]):
        def clear(self) -> None:
            super().clear()
            self.update(
                {
                    Embed(model="", inputs=(), prompt_name=f"of another {number}"): ""
                    for number in range(MAX_CACHED_OPTIONS)
                }
            )

    known: OptionsCache[str] = OptionsCache()
    known._found = Raced()
    for number in range(3 * MAX_CACHED_OPTIONS):
        known.get_or_compute(embed("a", dimensions=number), Worker())
    assert len(known._found) <= MAX_CACHED_OPTIONS + 1


def test_invented_prompt_names_are_not_kept() -> None:
    """The cache is bounded: neither a long name nor any number of short ones stays."""
    known: OptionsCache[str] = OptionsCache()
    worker = Worker()
    long = "x" * (KNOWN_NAME + 1)
    for _ in range(2):
        assert known.get_or_compute(embed("a", prompt_name=long), worker) == f"{long} None"
    assert len(worker.tasks) == 2
    for number in range(MAX_CACHED_OPTIONS + 1):
        known.get_or_compute(embed("a", dimensions=number), worker)
    known.get_or_compute(embed("a", dimensions=MAX_CACHED_OPTIONS), worker)
    assert len(worker.tasks) == 2 + MAX_CACHED_OPTIONS + 1
    known.get_or_compute(embed("a", dimensions=0), worker)
    assert len(worker.tasks) == 2 + MAX_CACHED_OPTIONS + 2

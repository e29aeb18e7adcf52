from __future__ import annotations

import time

import pytest

from shoal.core import registry as registry_module
from shoal.core.registry import LONGEST_SHOWN, Model, Registry
from shoal.errors import (
    AddressError,
    InternalError,
    ModelFailed,
    ModelNotFound,
    ModelNotReady,
    SetupError,
)
from shoal.types import TaskKind
from tests.unit.core.runners import Embedder
from tests.unit.core.talks import make_runner


def registry(*models: Model) -> Registry:
    made = Registry()
    for model in models:
        made.add(model)
    return made


def ready(name: str, *, default_for: tuple[TaskKind, ...] = (), talks: bool = False) -> Model:
    model = Model(name, default_for=default_for)
    model.mark_loaded(make_runner() if talks else Embedder())
    return model


def test_models_are_found_by_name_and_alias() -> None:
    """Every name leads to its model; models are listed in order of arrival."""
    first, second = Model("b", ("other", "third")), Model("a")
    names = registry(first, second)
    assert [names.find(name) for name in ("b", "other", "third", "a")] == [first, first, first, second]
    assert list(names) == [first, second]


@pytest.mark.parametrize("clash", [Model("x"), Model("y", ("x",)), Model("al"), Model("z", ("al",))])
def test_a_name_means_one_model(clash: Model) -> None:
    """A duplicate name or alias is refused with a hint, and no state of the new model stays."""
    names = registry(Model("x", ("al",)))
    with pytest.raises(AddressError, match="NAME=ADDRESS"):
        names.add(clash)
    assert [model.name for model in names] == ["x"]
    if clash.name not in ("x", "al"):
        with pytest.raises(ModelNotFound):
            names.find(clash.name)


def test_a_server_that_is_not_there_may_have_it() -> None:
    """A model that is not served may belong to an unreachable server; served models are found as usual."""
    names = registry(talks := ready("talks", talks=True))
    names.pending_sources["openai+http://there"] = "connection refused"
    cases: list[tuple[str, TaskKind, str]] = [
        ("x", "generate", "the model 'x'"),
        ("", "embed", "a model that can embed"),
    ]
    for name, task, meant in cases:
        with pytest.raises(ModelNotReady) as caught:
            names.find(name, task)
        why = "openai+http://there: connection refused"
        assert str(caught.value) == f"{meant} may be on a server that is not ready yet ({why}): try again soon"
    assert names.find("talks") is names.find("", "generate") is talks
    names.pending_sources.clear()
    with pytest.raises(ModelNotFound):
        names.find("x")


def test_removed_models_free_their_names() -> None:
    """After one or two removals the model is not found and its names are free."""
    model = Model("x", ("al",))
    names = registry(model, Model("stays"))
    names.remove(model)
    names.remove(model)
    assert [each.name for each in names] == ["stays"]
    for name in ("x", "al"):
        with pytest.raises(ModelNotFound):
            names.find(name)
    names.add(Model("al", ("x",)))


def test_a_model_that_comes_back_takes_its_place_again() -> None:
    """After an unload and a load the same model is the default again; new models come last."""
    first, second, third = ready("first"), ready("second"), ready("third")
    names = registry(first, second, third)
    names.remove(first)
    assert names.find("") is second
    names.remove(second)
    names.add(back := ready("first"))
    names.add(ready("new"))
    names.add(ready("second"))
    assert names.find("") is back
    assert [model.name for model in names] == ["first", "second", "third", "new"]


def test_iteration_bears_removal() -> None:
    """Models may be removed during an iteration."""
    names = registry(Model("a"), Model("b"))
    for model in names:
        names.remove(model)
    assert not list(names)


def test_no_name_asks_for_the_default_of_the_task() -> None:
    """The default is the configured model, else the first one that supports the task; a loading model may support
    it."""
    embeds, talks = ready("embeds"), ready("talks", talks=True)
    names = registry(talks, embeds)
    assert (names.find(""), names.find("", "generate")) == (embeds, talks)
    chosen = ready("chosen", default_for=("embed",))
    names.add(chosen)
    assert (names.find(""), names.find("", "generate")) == (chosen, talks)
    assert registry(loading := Model("l"), ready("e")).find("") is loading


def test_without_an_able_model_there_is_no_default() -> None:
    """The error says whether no model is served, or none that supports the task."""
    with pytest.raises(ModelNotFound, match="no model is served: start one with `shoal serve"):
        Registry().find("")
    with pytest.raises(ModelNotFound, match="none of the served models can generate") as caught:
        registry(ready("e")).find("", "generate")
    assert caught.value.param == "model"


def test_unknown_names_get_a_near_one_or_the_list() -> None:
    """The error suggests a similar name or alias, else it lists the served models."""
    names = registry(Model("all-MiniLM-L6-v2", ("minilm",)))
    for wrong, meant in (("all-minilm-l6-v2", "all-MiniLM-L6-v2"), ("minilmm", "minilm")):
        with pytest.raises(ModelNotFound, match=f"did you mean '{meant}'") as caught:
            names.find(wrong)
        assert caught.value.param == "model"
    with pytest.raises(ModelNotFound, match=r"does not exist: available models: 'all-MiniLM-L6-v2'$"):
        names.find("gpt-4o")
    with pytest.raises(ModelNotFound, match=r"does not exist: no model is served$"):
        registry().find("gpt-4o")
    with pytest.raises(ModelNotFound, match=r"available models: 'm0', 'm1', .*'m7', \.\.\.$"):
        registry(*(Model(f"m{number}") for number in range(9))).find("gpt-4o")


def test_a_name_as_long_as_a_body_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of 30 MB is neither compared nor sent back."""
    compared: list[str] = []

    def close_matches(name: str, *_: object, **__: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(registry_module, "get_close_matches", close_matches)
    names = registry(Model("all-MiniLM-L6-v2"))
    with pytest.raises(ModelNotFound) as caught:
        names.find("ab" * 15_000_000)
    assert [len(name) for name in compared] == [LONGEST_SHOWN]
    assert len(caught.value.message) < LONGEST_SHOWN + 100


def test_models_that_cannot_answer_say_why() -> None:
    """A loading model asks to retry, a failed one gives the reason, an unloading one is gone, and a ready one has a
    runner."""
    model = Model("m")
    with pytest.raises(ModelNotReady, match="is loading: try again") as caught:
        model.ready_runner()
    assert (caught.value.param, caught.value.retry_after) == ("model", 2.0)
    model.mark_failed(SetupError("the file is broken"))
    with pytest.raises(ModelFailed, match="failed to load: the file is broken") as failed:
        model.ready_runner()
    assert (failed.value.param, failed.value.retry_after) == ("model", None)
    model.transition("load")
    model.mark_loaded(runner := Embedder())
    assert model.ready_runner() is runner
    model.transition("unload")
    with pytest.raises(ModelNotReady, match="is unloading"):
        model.ready_runner()


def test_impossible_events_leave_the_state() -> None:
    """An invalid event is an InternalError and does not change the model."""
    model = ready("m")
    with pytest.raises(InternalError):
        model.transition("loaded")
    assert model.state == "ready"


def test_cards_tell_what_is_known() -> None:
    """Cards show the facts after a load, the error after a failure, and the current state."""
    model = Model("m", ("al",), ("embed",), created=7)
    card = model.card()
    assert (card.name, card.aliases, card.default_for, card.created) == ("m", ("al",), ("embed",), 7)
    assert (card.state, card.facts, card.error) == ("loading", None, None)
    model.mark_failed(SetupError("no"))
    assert (model.card().state, model.card().error) == ("failed", "no")
    model.transition("load")
    model.mark_loaded(runner := Embedder())
    assert (model.card().state, model.card().facts, model.card().error) == ("ready", runner.facts, None)


def test_what_a_model_waits_for_is_in_its_refusal_and_card() -> None:
    """The reason of the wait is shown until the model is loaded."""
    model = Model("m")
    model.note = "waiting for triton at h:1: connection refused"
    assert model.card().note == model.note
    with pytest.raises(ModelNotReady, match=r"is loading \(waiting for triton at h:1: connection refused\): try again"):
        model.ready_runner()
    model.mark_loaded(Embedder())
    assert model.card().note == ""


def test_a_sleeping_model_keeps_its_facts() -> None:
    """A sleeping model stays the default of the tasks it supports, and of no others."""
    sleeper, talks = ready("sleeper"), ready("talks", talks=True)
    for happening in ("unload", "closed"):
        sleeper.transition(happening)
    facts, sleeper.runner, sleeper.is_sleeping = sleeper.facts, None, True
    names = registry(sleeper, talks)
    assert (names.find(""), names.find("", "generate")) == (sleeper, talks)
    card = sleeper.card()
    assert (card.facts, card.sleeping, card.state) == (facts, True, "unloaded")
    assert facts is not None


def test_a_model_that_never_loaded_keeps_no_place() -> None:
    """Retrying a failed load takes no requests from models that answer; after a load the model has its position."""
    names = registry()
    names.add(wrong := Model("late", required=False))
    names.remove(wrong)
    names.add(serving := ready("serving"))
    names.add(late := Model("late", required=False))
    assert names.find("") is serving
    late.mark_loaded(Embedder())
    names.remove(late)
    names.remove(serving)
    for name in ("late", "serving"):
        names.add(again := Model(name, required=False))
        names.remove(again)
        names.add(ready(name))
    assert [model.name for model in names] == ["serving", "late"]


def test_a_sleeping_model_is_reported() -> None:
    """A sleeping model reports sleep until it wakes, then the reason of the wait."""
    model = Model("m")
    assert model.card().status_text == "loading"
    model.mark_loaded(Embedder())
    assert model.card().status_text == "ready"
    model.is_sleeping = True
    model.transition("unload")
    assert model.card().status_text == "sleeping"
    model.transition("closed")
    assert model.card().status_text == "sleeping"
    model.transition("load")
    model.note = "compiling"
    assert model.card().status_text == "loading: compiling"


def test_what_may_turn_out_to_is_the_default_of_embedding_alone() -> None:
    """A loading model is the default only for embedding, whose vectors must not change with load times; other tasks
    use a model known to support them."""
    late, talks, embeds = Model("late"), ready("talks", talks=True), ready("embeds")
    names = registry(late, talks, embeds)
    assert (names.find(""), names.find("", "generate")) == (late, talks)
    assert names.find("", "classify") is late
    late.mark_failed(SetupError("no"))
    assert (names.find(""), names.find("", "generate")) == (late, talks)
    assert registry(talks, embeds).find("", "rerank") is embeds


def scoring(name: str, tasks: tuple[TaskKind, ...], *, default_for: tuple[TaskKind, ...] = ()) -> Model:
    model = Model(name, default_for=default_for)
    model.mark_loaded(Embedder(tasks))
    return model


def test_classification_prefers_a_classifier() -> None:
    """A reranker classifies only if no model is known to, or if it is the configured default."""
    ranker, judge = scoring("ranker", ("rerank", "classify")), scoring("judge", ("classify",))
    names = registry(Model("late"), ranker, judge)
    assert (names.find("", "classify"), names.find("", "rerank")) == (judge, ranker)
    assert registry(Model("late"), ready("embeds"), ranker).find("", "classify") is ranker
    chosen = scoring("chosen", ("rerank", "classify"), default_for=("classify",))
    assert registry(judge, chosen).find("", "classify") is chosen


def test_exact_names_are_got_without_a_hint() -> None:
    """A lookup by name or alias returns None for unknown names and for ""."""
    names = registry(model := Model("m", ("al",)))
    assert [names.get(name) for name in ("m", "al", "x", "")] == [model, model, None, None]


def test_the_last_request_calls_idle() -> None:
    """Only the last request that leaves calls `idle`."""
    idle: list[int] = []
    model = Model("m", idle=lambda model: idle.append(model.inflight))
    for _ in range(3):
        model.enter()
    for left in (2, 1, 0):
        model.leave()
        assert (model.inflight, len(idle)) == (left, int(not left))


def test_created_is_now() -> None:
    """`created` is in whole Unix seconds."""
    before = int(time.time())
    assert before <= Model("m").created <= time.time()


def test_unloaded_models_are_listed_until_they_are_deleted() -> None:
    """By their own names, not by their aliases."""
    names = Registry()
    for name in ("a", "b"):
        names.remember_unloaded(Model(name, (f"{name}-alias",)))
    assert names.unloaded_names() == {"a", "b"}
    names.forget("a")
    assert names.unloaded_names() == {"b"}

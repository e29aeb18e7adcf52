"""Health tracking without a server; test_engine and test_llm test the rest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from shoal.backends.triton.presence import ModelPresence
from shoal.errors import ConfigError, Crashed, ShoalError, TransportFailed
from tests.unit.backends.triton.open.kit import until


@dataclass(frozen=True)
class Schema:
    kind: str = "one"

    @property
    def tensors(self) -> tuple[object, ...]:
        return (self.kind,)


@dataclass
class Model:
    """An endpoint: `serves` is its health, `found` its schema, `fails` the error of finding it."""

    serves: bool = True
    found: Schema = field(default_factory=Schema)
    fails: ShoalError | None = None
    looks: int = 0
    finds: list[tuple[bool, bool]] = field(default_factory=list)
    users: set[object] = field(default_factory=set)

    async def is_serving(self) -> bool:
        self.looks += 1
        return self.serves

    async def find(self, *, again: bool = False, reload: bool = False) -> Schema:
        self.finds.append((again, reload))
        if self.fails is not None:
            raise self.fails
        self.serves = True
        return self.found


class FakeAdmission:
    def __init__(self) -> None:
        self.error: ShoalError | None = None

    async def __call__(self) -> None:
        if self.error is not None:
            raise self.error


def watch(model: Model, admission: FakeAdmission | None = None, *, serving: bool = True) -> ModelPresence[Schema]:
    return ModelPresence("it", model, Schema(), admission or FakeAdmission(), serving=serving)


async def test_nothing_is_looked_at_before_the_start() -> None:
    model = Model()
    found = watch(model, serving=False)
    await asyncio.sleep(0)
    assert (found.ready, found.reason, model.looks, model.finds) == (False, "it has not been reached yet", 0, [])
    await found.aclose()


async def test_the_first_time_it_may_be_loaded_later_it_is_found_again() -> None:
    """A model that was unloaded later stays unloaded."""
    model = Model()
    found = watch(model, serving=False)
    found.start(look_s=0.0, again_s=(0.0,))
    await until(lambda: found.ready)
    model.serves = False
    await until(lambda: len(model.finds) == 2 and found.ready)
    assert model.finds == [(False, False), (True, False)]
    assert found.reason == ""
    await found.aclose()


@pytest.mark.parametrize(("error", "reload"), [(TransportFailed("gone"), False), (Crashed("dead"), True)])
async def test_a_loss_is_looked_at_now(error: ShoalError, reload: bool) -> None:
    """Without waiting for the next check; a dead process is reloaded once."""
    model = Model()
    found = watch(model)
    found.start(look_s=3600.0, again_s=(0.0,))
    found.check_now()
    await until(lambda: model.looks == 1)
    found.mark_lost(error)
    assert (found.ready, found.reason) == (False, error.message)
    await until(lambda: found.ready)
    found.mark_lost(TransportFailed("again"))
    await until(lambda: found.ready)
    assert model.finds == [(True, reload), (True, False)]
    await found.aclose()


async def test_what_came_back_otherwise_stays_out() -> None:
    model, admission = Model(found=Schema("other")), FakeAdmission()
    found = watch(model, admission, serving=False)
    found.start(look_s=0.0, again_s=(0.0,))
    await until(lambda: "differ from the other replicas'" in found.reason)
    model.found, admission.error = Schema(), ConfigError("not through this door")
    await until(lambda: found.reason == "not through this door")
    admission.error = None
    await until(lambda: found.ready)
    model.serves, model.found = False, Schema("other")
    await until(lambda: "have changed: reload" in found.reason)
    assert found.schema == Schema()
    await found.aclose()


async def test_closed_it_is_out_of_service_for_good() -> None:
    model = Model()
    found = watch(model)
    found.start(look_s=0.0, again_s=(0.0,))
    await until(lambda: model.looks > 1)
    await found.aclose()
    await found.aclose()
    looks = model.looks
    for _ in range(5):
        await asyncio.sleep(0)
    assert (found.ready, model.looks) == (False, looks)

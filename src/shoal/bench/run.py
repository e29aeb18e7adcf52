"""One measurement of a running server, from its plan to its figures."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from shoal.bench.client import Pool, Target
from shoal.bench.load import run_closed_loop, run_open_loop
from shoal.bench.stats import Summary, summarize
from shoal.bench.texts import Bodies, Encoding, Surface, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: `rate` None is a closed loop of `clients`, else requests a second over at most `clients` connections."""

    url: str
    model: str = ""
    clients: int = 64
    duration: float = 10.0
    warmup: float = 2.0
    tokens: int = 16
    texts: int = 1
    rate: float | None = None
    surface: Surface = "openai"
    encoding: Encoding = "float"
    key: str | None = None


async def measure(plan: Plan) -> tuple[Summary, float | None]:
    """Warm up, run, and answer the figures and the tokens a text as the server counted them (None: it does not say).

    Without a model, the first one that the server lists is asked.

    Raises OSError when nothing listens, ValueError for a bad URL and RuntimeError when the first request is refused.
    """
    target = Target(plan.url)
    # another start for every run, so that no run meets the texts of an earlier one in a cache
    texts = Texts(plan.tokens, seed=time.time_ns())
    headers = f"authorization: Bearer {plan.key}\r\n" if plan.key else ""
    pool = Pool(target, plan.clients)

    def make() -> bytes:
        return bodies.request(texts.take(plan.texts))

    try:
        model = plan.model
        if not model and plan.surface == "openai":
            model = await first_model(pool, target.name, headers)
        bodies = Bodies(plan.surface, model, plan.encoding, target.name, headers)
        first = await pool.ask(make(), keep=True)
        body = bytes(first.body or b"")
        if first.status != 200:
            raise RuntimeError(f"the server answered {first.status}: {body[:500].decode(errors='replace')}")
        await pool.open()
        if plan.warmup > 0:
            await run_closed_loop(pool, make, clients=plan.clients, seconds=plan.warmup, texts=plan.texts)
        if plan.rate is None:
            record = await run_closed_loop(pool, make, clients=plan.clients, seconds=plan.duration, texts=plan.texts)
        else:
            record = await run_open_loop(pool, make, rate=plan.rate, seconds=plan.duration, texts=plan.texts)
    finally:
        pool.close()
    return summarize(record), _tokens_each(body, plan.texts)


async def first_model(pool: Pool, host: str, headers: str, task: str = "embed") -> str:
    """The first model that a server lists for this task, or of which it does not say what it can.

    Raises OSError when nothing listens, RuntimeError when there is none.
    """
    reply = await pool.ask(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n{headers}\r\n".encode(), keep=True)
    body = bytes(reply.body or b"")
    try:
        listed = msgspec.json.decode(body, type=_Models).data
        return next(one.id for one in listed if not one.tasks or task in one.tasks)
    except (msgspec.MsgspecError, StopIteration):
        if reply.status == 401:
            raise RuntimeError("the server requires a key (401): pass it with --api-key") from None
        raise RuntimeError(f"the server lists no models (status {reply.status}): name one with --model") from None


class _Model(msgspec.Struct):
    id: str
    tasks: list[str] = []


class _Models(msgspec.Struct):
    data: list[_Model]


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


def _tokens_each(body: bytes, texts: int) -> float | None:
    try:
        return msgspec.json.decode(body, type=_Answer).usage.prompt_tokens / texts
    except msgspec.MsgspecError:
        return None

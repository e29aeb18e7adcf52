"""One measurement of a running server, from its plan to its figures."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from shoal.bench.client import Pool, Target
from shoal.bench.load import closed_loop, open_loop
from shoal.bench.stats import Summary, summarise
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

    Raises OSError when nothing listens, ValueError for a bad URL and RuntimeError when the first request is refused.
    """
    target = Target(plan.url)
    # another start for every run, so that no run meets the texts of an earlier one in a cache
    texts = Texts(plan.tokens, seed=time.time_ns())
    headers = f"authorization: Bearer {plan.key}\r\n" if plan.key else ""
    bodies = Bodies(plan.surface, plan.model, plan.encoding, target.name, headers)
    pool = Pool(target, plan.clients)

    def make() -> bytes:
        return bodies.request(texts.take(plan.texts))

    try:
        first = await pool.ask(make(), keep=True)
        body = bytes(first.body or b"")
        if first.status != 200:
            raise RuntimeError(f"the server answered {first.status}: {body[:500].decode(errors='replace')}")
        await pool.open()
        if plan.warmup > 0:
            await closed_loop(pool, make, clients=plan.clients, seconds=plan.warmup, texts=plan.texts)
        if plan.rate is None:
            record = await closed_loop(pool, make, clients=plan.clients, seconds=plan.duration, texts=plan.texts)
        else:
            record = await open_loop(pool, make, rate=plan.rate, seconds=plan.duration, texts=plan.texts)
    finally:
        pool.close()
    return summarise(record), _tokens_each(body, plan.texts)


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


def _tokens_each(body: bytes, texts: int) -> float | None:
    try:
        return msgspec.json.decode(body, type=_Answer).usage.prompt_tokens / texts
    except msgspec.MsgspecError:
        return None

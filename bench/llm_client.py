"""The load of `triton_llm.py`, in a process of its own, driven by lines of JSON: the same loop over gRPC or HTTP.

A job: `kind` ("grpc" or "http"), `url`, `model`, `streams`, `requests`, `tokens`, `endpoint`, and `count`: have Triton
count tokens. Both kinds build a new prompt for every request, read every piece of text and note when it came; the event
loop is uvloop's, as Shoal's is.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import msgspec
import uvloop

from shoal.backends.triton.client import Client
from shoal.bench.chat import ChatClient, ChatPlan, HttpChatClient, run_levels
from shoal.bench.client import Pool, Target
from shoal.cli._triton_stream import GrpcChatClient


async def work(job: dict[str, Any], asks: ChatClient, plan: ChatPlan) -> dict[str, Any]:
    before = time.process_time()
    (found,) = await run_levels(asks, plan, time.time_ns())
    spent = time.process_time() - before
    if found.errors or found.requests != job["requests"]:
        raise RuntimeError(f"{job['kind']}: {found.errors}, {found.requests} answers")
    tokens = found.rows["Output Sequence Length (tokens)"].avg
    if tokens != job["tokens"]:
        raise RuntimeError(f"{job['kind']}: {tokens} tokens an answer on average, not {job['tokens']}")
    report: dict[str, Any] = msgspec.to_builtins(found)
    return report | {"client_cpu_us": spent / (found.requests * tokens) * 1e6}


async def run(job: dict[str, Any]) -> dict[str, Any]:
    plan = ChatPlan(
        model=job["model"],
        concurrency=(job["streams"],),
        requests=job["requests"],
        input_tokens=200,
        output_tokens=job["tokens"],
        endpoint=job.get("endpoint", "completions"),
    )
    if job["kind"] == "grpc":
        client = Client(job["url"])
        try:
            return await work(job, await GrpcChatClient.connect(client, plan, count=job.get("count", False)), plan)
        finally:
            await client.aclose()
    target = Target(job["url"])
    pool = Pool(target, job["streams"])
    await pool.open()
    try:
        return await work(job, HttpChatClient(pool, target.name, plan, model=job["model"]), plan)
    finally:
        pool.close()


async def main() -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await run(json.loads(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(main())

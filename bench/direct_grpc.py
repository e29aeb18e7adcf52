"""The other side of `triton_grpc.py`: a `grpc.aio` client of its own, straight to Triton. Driven by lines of JSON.

Run in a process of its own. A job: `url` (host:port), `model`, `texts` a call, `clients` calls in flight, `seconds`.
Every call builds its request from new texts and ends when the answer is a numpy array, as a program that uses the
vectors would do. The channel is one, as Shoal's is, and the event loop uvloop's, as Shoal's is.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import numpy as np
import uvloop

from shoal.backends.triton.client import Client
from shoal.backends.triton.response import read_outputs
from shoal.bench.stats import summarize_latencies
from shoal.bench.texts import Texts
from shoal.kserve import codec
from shoal.kserve.protocol_pb2 import ModelInferRequest

TIMEOUT_S = 30.0


async def call(client: Client, model: str, texts: list[str]) -> None:
    request = ModelInferRequest(model_name=model)
    codec.add_input(request, "text", "BYTES", np.array(texts, dtype=object)[:, None])
    request.outputs.add(name="embedding")
    answer = read_outputs(await client.infer(request, time.monotonic() + TIMEOUT_S))["embedding"]
    if len(answer) != len(texts):
        raise RuntimeError(f"{len(answer)} rows for {len(texts)} texts")


async def closed_loop(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """`clients` callers that each wait for their answer before they ask again."""
    texts = Texts(job["tokens"], seed=random.getrandbits(48))
    latencies: list[float] = []
    start = time.perf_counter()
    end = start + job["seconds"]

    async def caller() -> None:
        while (sent := time.perf_counter()) < end:
            await call(client, job["model"], texts.take(job["texts"]))
            latencies.append(time.perf_counter() - sent)

    before = time.process_time()
    await asyncio.gather(*(caller() for _ in range(job["clients"])))
    seconds = time.perf_counter() - start
    found = summarize_latencies(latencies)
    return {
        "requests": len(latencies),
        "per_s": len(latencies) / seconds,
        "p50": found["p50"],
        "p99": found["p99"],
        "client_cpu_s": time.process_time() - before,
    }


async def main() -> None:
    clients: dict[str, Client] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        client = clients.setdefault(job["url"], Client(job["url"]))
        print(json.dumps(await closed_loop(client, job)), flush=True)
    for client in clients.values():
        await client.aclose()


if __name__ == "__main__":
    uvloop.run(main())

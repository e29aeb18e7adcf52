"""One client of `bench/kserve.py`, run by a Python that has tritonclient: prints the p50 in ms of each way, by round.

python bench/kserve_client.py HTTP_PORT GRPC_PORT SOCKET MODEL ROUNDS REQUESTS
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median

import numpy as np
import tritonclient.grpc
import tritonclient.http


def texts() -> Iterator[str]:
    """Yield distinct texts of about 16 tokens."""
    for number in count(time.monotonic_ns()):
        yield f"a short text about the fish in the sea and their number {number % 100_000}"


def main() -> None:
    http_port, grpc_port, socket, model, rounds, requests = sys.argv[1:]
    text = texts()

    def infer(package: object, client: object) -> None:
        tensor = package.InferInput("text", [1, 1], "BYTES")  # type: ignore[attr-defined]
        tensor.set_data_from_numpy(np.array([[next(text)]], dtype=object))
        outputs = [package.InferRequestedOutput("embeddings")]  # type: ignore[attr-defined]
        client.infer(model, [tensor], outputs=outputs).as_numpy("embeddings")  # type: ignore[attr-defined]

    connection = http.client.HTTPConnection("127.0.0.1", int(http_port))

    def openai() -> None:
        body = json.dumps({"model": model, "input": next(text)})
        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        np.array(json.loads(connection.getresponse().read())["data"][0]["embedding"], np.float32)

    rest = tritonclient.http.InferenceServerClient(f"127.0.0.1:{http_port}")
    grpc = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}")
    unix = tritonclient.grpc.InferenceServerClient(f"unix:{socket}")
    ways: dict[str, Callable[[], None]] = {
        "grpc": lambda: infer(tritonclient.grpc, grpc),
        "grpc_socket": lambda: infer(tritonclient.grpc, unix),
        "rest": lambda: infer(tritonclient.http, rest),
        "openai": openai,
    }
    for _ in range(int(rounds) + 1):
        found = {}
        for name, call in ways.items():
            took = []
            for _ in range(int(requests)):
                start = time.perf_counter()
                call()
                took.append(time.perf_counter() - start)
            found[name] = median(took) * 1000
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

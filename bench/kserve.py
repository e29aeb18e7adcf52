"""One embedding over gRPC beside one over HTTP, by the same client library, one client at a time.

    python bench/kserve.py --client .venv-clients-old/bin/python

`--client`: a Python with `tritonclient[grpc,http]`, as `make test-clients` makes one.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness import HERE, Server, free_port, medians, parser, phase, write

METHOD = """
p50 in ms of a closed loop of one client, distinct texts of about 16 tokens, default settings. `grpc`: tritonclient over
TCP; `grpc_socket`: over a Unix socket; `rest`: tritonclient.http with binary tensors; `openai`: /v1/embeddings with
http.client and json. `fake`: a model that costs nothing, of 384 numbers. The ways take turns in every round; medians
over rounds, the first one left out.
"""


def measure(client: str, address: str, rounds: int, requests: int) -> dict[str, Any]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grpc.sock"
        with Server(address, grpc_port=port, grpc_socket=path, access_log="false") as server:
            server.settle()
            arguments = [server.port, port, path, server.model, rounds, requests]
            command = [client, str(HERE / "kserve_client.py"), *map(str, arguments)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = medians([json.loads(line) for line in printed.splitlines()[1:]])
    return {**found, "grpc_over_rest": round(found["grpc"] / found["rest"], 3)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--client", required=True)
    options.add_argument("--requests", type=int, default=200)
    arguments = options.parse_args()
    results = {}
    for name, address in (("default", arguments.model), ("fake", "fake:dimension=384")):
        with phase(name):
            results[name] = measure(arguments.client, address, arguments.rounds, arguments.requests)
            print(results[name])
    write("kserve", METHOD, results)


if __name__ == "__main__":
    main()

"""What a request costs each tier of Shoal; from that bench/sizing.py plans, simulates and fills docs/scaling.md.

`python bench/scaling.py` measures, simulates, and writes results/scaling.json and the page; `--simulate` keeps what was
measured, `--page` keeps all of the results.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import sizing
from harness import Server, cpu_s, medians, parser, phase, stored, write, wrk
from workers import ADDRESS, Workers, children

from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.bench.texts import Bodies, Encoding, Texts

METHOD = """
`shoal serve fake:dimension=384 --workers 2`, base64 answers, wrk on the same cores, every text distinct. `us`:
processor time of the two fronts together and of the model process, each by its own process, in microseconds a request:
one text of 16 tokens and one of 128 over 64 connections, lists of 32 texts of 16 tokens over 16. `text_us`: processor
time a text of what `fake:` does in the place of a model (`fake`: hashes for tokens and vector) and of the tokenizer of
the default model (`tokenizer`: one text a call). Medians over rounds. `memory_mb`: resident, after the load. `bytes`:
one request and one answer with their HTTP heads, without those of TCP and IP. The machine was shared, so rates say
nothing and processor time is somewhat high. `simulated`: see docs/scaling.md.
"""
LOADS = {"1 x 16": (1, 16, 64), "32 x 16": (32, 16, 16), "1 x 128": (1, 128, 64)}
"""Texts a request, tokens a text, connections."""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--simulate", action="store_true", help="simulate and write the page from what was measured")
    made.add_argument("--page", action="store_true", help="only write the page from the results")
    arguments = made.parse_args()
    path = sizing.RESULTS / "scaling.json"
    if not arguments.page:
        if not arguments.simulate:
            write("scaling", METHOD, measure(arguments.rounds, arguments.seconds))
        report = json.loads(path.read_text())
        with phase("simulate"):
            report["results"]["simulated"] = sizing.simulate_all(report["results"])
        report["method"] = " ".join(METHOD.split())
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    sizing.update_page()


def measure(count: int, seconds: float) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    with Workers(ADDRESS, workers=2) as server:
        assert server.process is not None
        roles = {pid: role(pid) for pid in children(server.process.pid)}
        if sorted(roles.values()) != ["front", "front", "models"]:
            raise RuntimeError(f"expected two fronts and a model process: {roles}")
        wrk(server, 16, 64, 2, encoding="base64")
        for number in range(count):
            with phase(f"round {number + 1}"):
                rounds.append(measure_round(server, roles, seconds))
        memory = {"front": resident_mb(next(pid for pid in roles if roles[pid] == "front"))}
        memory["model process"] = resident_mb(next(pid for pid in roles if roles[pid] == "models"))
        sizes = {
            f"{texts} x 16, {encoding}": exchanged(server, texts, encoding)
            for texts in (1, 32)
            for encoding in ("float", "base64")
        }
    own = measure_texts(count)
    return {"us": medians(rounds), "text_us": own, "bytes": sizes, "memory_mb": memory, "rounds": rounds}


def measure_round(server: Server, roles: dict[int, str], seconds: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, (texts, tokens, clients) in LOADS.items():
        before = {pid: cpu_s(pid) for pid in roles}
        ran = wrk(server, tokens, clients, seconds, each=texts, expected=12_000 / texts**0.5, encoding="base64")
        for tier in ("front", "models"):
            used = sum(cpu_s(pid) - before[pid] for pid in roles if roles[pid] == tier)
            found[f"{name}, {tier}"] = used / ran["requests"] * 1e6
    return found


def measure_texts(count: int) -> dict[str, float]:
    """Processor time a text of what `fake:` computes, and of a real tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(stored().tokenizer))
    tokenizer.no_padding()
    found: dict[str, float] = {}
    for tokens in (16, 128):
        texts = Texts(tokens, seed=5).take(2000)
        found[f"fake, {tokens}"] = us_each(lambda text: compute_vector(tokenize_item(text), 384), texts, count)
        found[f"tokenizer, {tokens}"] = us_each(lambda text: tokenizer.encode_batch_fast([text]), texts, count)
    return found


def us_each(call: Callable[[str], object], texts: list[str], count: int) -> float:
    rounds = []
    for _ in range(count):
        start = time.process_time()
        for text in texts:
            call(text)
        rounds.append((time.process_time() - start) / len(texts) * 1e6)
    return round(median(rounds), 1)


def role(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index("shoal.cli._processes") + 1]


def resident_mb(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1024, 1)


def exchanged(server: Server, texts: int, encoding: Encoding) -> dict[str, int]:
    """Bytes of one request and of its answer."""
    body = Bodies("openai", server.model, encoding, f"127.0.0.1:{server.port}")
    request = body.request(Texts(16, seed=3).take(texts))
    with socket.create_connection(("127.0.0.1", server.port)) as connection, connection.makefile("rb") as reader:
        connection.sendall(request)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += reader.readline()
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        answer = reader.read(int(length.partition(b":")[2]))
    if len(json.loads(answer)["data"]) != texts:
        raise RuntimeError("the answer has another number of vectors")
    return {"request": len(request), "answer": len(head) + len(answer)}


if __name__ == "__main__":
    main()

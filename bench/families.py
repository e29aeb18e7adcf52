"""Families with a graph of Shoal's own, at realistic sizes, against sentence-transformers in process."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from family_models import GRAPHS
from harness import HERE, RESULTS, Server, medians, parser, phase, stored, write
from versus_st import SentenceTransformers, ask_all

from shoal.bench.machine import describe_machine
from shoal.bench.texts import Texts

METHOD = """
A model of random weights and realistic sizes for each family, saved by sentence-transformers, is served from its files
in f32 by `shoal serve` with defaults, and opened by sentence-transformers in a process of its own (f32, torch threads =
cores). One works at a time, in alternating rounds, on the same new distinct texts. Shoal is asked over HTTP on the same
cores: `singles` is 64 connections with one text a request, `lists` 4 connections with 8 texts a request. Of
sentence-transformers `list` is `encode(batch_size=32)` of all texts, `one` a call for each text. Figures are texts/s,
medians. Memory: VmHWM and VmRSS of each process after the rounds. `cosine`: the least over 24 texts of 5 to 200 tokens.
"""

MOST_TOKENS = 8192
"""Of one measurement; it has at least LEAST_TEXTS texts."""

LEAST_TEXTS = 32


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--python", default=".venv-parity/bin/python", help="Python with sentence-transformers")
    options.add_argument("--only", nargs="*", choices=GRAPHS, default=list(GRAPHS), help="these models")
    options.add_argument("--keep", action="store_true", help="keep the stored results of the other models")
    options.add_argument("--work", type=float, default=4e11, help="multiply-adds of one measurement, about")
    arguments = options.parse_args()
    results: dict[str, Any] = json.loads((RESULTS / "families.json").read_text())["results"] if arguments.keep else {}
    for name in arguments.only:
        folder = Path(tempfile.mkdtemp(prefix="family-"))
        try:
            results[name] = one_family(name, folder, arguments)
        finally:
            shutil.rmtree(folder)
        print(name, json.dumps(results[name]), flush=True)
        write("families", METHOD, results)


def one_family(name: str, folder: Path, arguments: Any) -> dict[str, Any]:
    with phase(f"{name}: write"):
        tokenizer = stored(arguments.model).tokenizer
        made = [arguments.python, str(HERE / "family_models.py"), name, str(tokenizer), str(folder)]
        subprocess.run(made, check=True, stderr=subprocess.DEVNULL)
        model = folder / "model"
        shutil.rmtree(folder / "encoder")
    with ExitStack() as stack:
        with phase(f"{name}: open"):
            server = stack.enter_context(
                Server(f"file:{model}", precision="f32", embed_timeout_s=600, home=folder / "home")
            )
            server.settle()
            peer = SentenceTransformers(arguments.python, model)
            stack.callback(peer.close)
        found: dict[str, Any] = {
            "weights_millions": round(peer.facts["parameters"] / 1e6),
            "peer": peer.facts["versions"],
        }
        found["processor"] = describe_machine().processor  # results of others may be kept
        found["start_to_ready_s"] = round(server.ready_s, 1)
        found["cosine"] = least_cosine(server, peer)
        rounds = []
        for number in range(arguments.rounds + 1):  # the first one warms up
            with phase(f"{name}: round {number}"):
                rounds.append(one_round(server, peer, min(MOST_TOKENS, arguments.work / peer.facts["work"]), number))
        found["texts_per_s"] = medians(rounds[1:])
        found["ratios"] = ratios(found["texts_per_s"])
        found["rounds"] = rounds[1:]
        assert server.process is not None
        pids = {"shoal": server.process.pid, "sentence-transformers": peer.process.pid}
        found["memory_mb"] = {name: memory(pid) for name, pid in pids.items()}
    return found


def one_round(server: Server, peer: SentenceTransformers, tokens: float, turn: int) -> dict[str, float]:
    """Texts a second of each contender; `tokens` is how many tokens one measurement has."""
    found: dict[str, float] = {}
    for length in (16, 100):
        count = max(LEAST_TEXTS, round(tokens / length / 32) * 32)
        texts = Texts(length, seed=time.time_ns()).take(count)
        contenders = {
            f"shoal singles {length}": lambda t=texts: asyncio.run(ask_all(server, t, connections=64, each=1)),
            f"peer list {length}": lambda t=texts: peer.encode(t, "f32"),
        }
        if length == 16:
            contenders[f"peer one {length}"] = lambda t=texts: one_by_one(peer, t)
        else:
            contenders[f"shoal lists {length}"] = lambda t=texts: asyncio.run(ask_all(server, t, connections=4, each=8))
        order = list(contenders)
        for label in order[turn % 3 :] + order[: turn % 3]:
            found[label] = contenders[label]()
            time.sleep(0.2)  # threads of the last one stop spinning
    return {name: round(found[name], 2) for name in sorted(found)}


def one_by_one(peer: SentenceTransformers, texts: list[str]) -> float:
    answer = peer.encode_for(2.0, [*texts, ""], each=1)
    return answer["texts"] / answer["seconds"]


def ratios(found: dict[str, float]) -> dict[str, float]:
    """Shoal's rates over those of sentence-transformers."""
    pairs = [("singles", "list", 16), ("singles", "one", 16), ("singles", "list", 100), ("lists", "list", 100)]
    return {
        f"{mine} / {theirs}, {length} tokens": round(
            found[f"shoal {mine} {length}"] / found[f"peer {theirs} {length}"], 2
        )
        for mine, theirs, length in pairs
    }


def least_cosine(server: Server, peer: SentenceTransformers) -> float:
    texts = [text for length in (5, 9, 33, 200) for text in Texts(length, seed=length).take(6)]
    body = json.dumps({"model": server.model, "input": texts}).encode()
    request = urllib.request.Request(server.url + "/v1/embeddings", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        ours = np.array([each["embedding"] for each in json.load(reply)["data"]])
    theirs = np.array(peer.vectors(texts))
    return float((ours * theirs).sum(1).min())


def memory(pid: int) -> dict[str, int]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {key: int(lines[key].split()[0]) // 1024 for key in ("VmHWM", "VmRSS")}


if __name__ == "__main__":
    main()

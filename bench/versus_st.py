"""Shoal over HTTP against sentence-transformers in process: same model files, same texts, same run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import HERE, Server, check_lengths, medians, parser, phase, stored, write

from shoal.bench.client import Pool, Target
from shoal.bench.stats import Record
from shoal.bench.texts import Bodies, Texts

METHOD = """
Contenders are processes of their own, all started first, only one at work at a time, in alternating rounds; every round
gives all of them the same new distinct texts of exact length. sentence-transformers: `encode(batch_size=32)` of the
whole list in process, torch threads = cores, as it is (f32) and under torch.autocast bf16; no HTTP, no JSON. Shoal: a
server for each precision, defaults otherwise, reached over HTTP on the same cores with base64 answers: `singles` is 64
connections with one text a request, `lists` is 4 connections with 32 texts a request. Figures are texts/s, medians.
"""
PRECISIONS = ("f32", "bf16", "auto")


class SentenceTransformers:
    """The other side, driven by lines of JSON."""

    def __init__(self, python: str, model: Path) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / "st_encode.py"), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self._line()

    def encode(self, texts: list[str], precision: str) -> float:
        """Texts a second."""
        assert self.process.stdin is not None
        print(json.dumps({"texts": texts, "precision": precision}), file=self.process.stdin, flush=True)
        return len(texts) / float(self._line()["seconds"])

    def vectors(self, texts: list[str]) -> list[list[float]]:
        """f32, a vector for each text."""
        assert self.process.stdin is not None
        print(json.dumps({"texts": texts, "precision": "f32", "vectors": True}), file=self.process.stdin, flush=True)
        found: list[list[float]] = self._line()["vectors"]
        return found

    def encode_for(self, seconds: float, texts: list[str], *, each: int) -> dict[str, float]:
        """f32, `each` texts at a time until the time is over: how many `texts`, in how many `seconds`, and the `p50_ms`
        of a call.

        Raises RuntimeError when the texts did not last.
        """
        assert self.process.stdin is not None
        request = {"texts": texts, "precision": "f32", "each": each, "limit_s": seconds}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self._line()
        if answer["texts"] + each > len(texts):
            raise RuntimeError(f"{len(texts)} texts did not last for {seconds} s")
        return {name: float(value) for name, value in answer.items()}

    def close(self) -> None:
        self.process.stdin.close() if self.process.stdin else None
        self.process.wait(30)

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the sentence-transformers process ended; see its messages above")
        found: dict[str, Any] = json.loads(line)
        return found


async def ask_all(server: Server, texts: list[str], *, connections: int, each: int) -> float:
    """Texts a second for the whole list."""
    target = Target(server.url)
    bodies = Bodies("openai", server.model, "base64", target.name)
    pool = Pool(target, connections)
    waiting = [bodies.request(texts[at : at + each]) for at in range(0, len(texts), each)][::-1]
    record = Record()

    async def caller() -> None:
        while waiting:
            reply = await pool.ask(waiting.pop())
            if reply.status != 200:
                record.errors[str(reply.status)] += 1

    await pool.open()
    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(connections)))
    seconds = time.perf_counter() - start
    pool.close()
    if record.errors:
        raise RuntimeError(f"requests failed: {dict(record.errors)}")
    return len(texts) / seconds


def one_round(servers: dict[str, Server], peer: SentenceTransformers, texts: list[str], turn: int) -> dict[str, float]:
    def shoal(precision: str, connections: int, each: int) -> float:
        return asyncio.run(ask_all(servers[precision], texts, connections=connections, each=each))

    contenders = {f"sentence-transformers {name}": (peer.encode, texts, name) for name in ("f32", "bf16")}
    contenders |= {f"shoal {name} singles": (shoal, name, 64, 1) for name in PRECISIONS}
    contenders |= {f"shoal {name} lists": (shoal, name, 4, 32) for name in PRECISIONS}
    order = list(contenders)
    shift = turn * 3 % len(order)
    found = {}
    for name in order[shift:] + order[:shift]:
        run, *arguments = contenders[name]
        found[name] = run(*arguments)
        time.sleep(0.2)  # threads of the last one stop spinning
    return {name: found[name] for name in order}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--python", default=".venv-parity/bin/python", help="Python with sentence-transformers")
    options.add_argument("--peer-model", type=Path, help="folder of the model's own files, where the store has none")
    options.add_argument("--texts", type=int, nargs=2, default=[2048, 1024], help="texts a round at 16, 100 tokens")
    arguments = options.parse_args()
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        servers = {}
        for precision in PRECISIONS:
            with phase(f"shoal {precision}"):
                servers[precision] = stack.enter_context(Server(arguments.model, precision=precision))
                servers[precision].settle()
        results["served"] = {name: server.card() for name, server in servers.items()}
        entry = stored(arguments.model)
        results["tokens_checked"] = check_lengths(entry.tokenizer, (16, 100))
        with phase("sentence-transformers"):
            own = [path.parent for path in entry.path.rglob("modules.json")]
            peer = SentenceTransformers(arguments.python, arguments.peer_model or own[0])
        stack.callback(peer.close)
        results["peer"] = peer.facts
        for tokens, count in zip((16, 100), arguments.texts, strict=True):
            texts = Texts(tokens, seed=time.time_ns())
            with phase(f"{tokens} tokens: warm-up"):
                one_round(servers, peer, texts.take(count // 4), 0)
            rounds = []
            for number in range(arguments.rounds):
                with phase(f"{tokens} tokens: round {number + 1}"):
                    rounds.append(one_round(servers, peer, texts.take(count), number))
            found = medians(rounds)
            results[f"{tokens} tokens"] = {"texts_per_s": found, "ratios": ratios(found), "rounds": rounds}
            print(json.dumps(results[f"{tokens} tokens"]["ratios"], indent=1))
    write("versus_st", METHOD, results)


def ratios(found: dict[str, float]) -> dict[str, float]:
    """Shoal's rate over sentence-transformers': like for like, and the default of one against that of the other."""
    pairs = {f"{name} / {name}": (name, name) for name in ("f32", "bf16")} | {"auto / f32": ("auto", "f32")}
    return {
        f"{label} ({kind})": round(found[f"shoal {mine} {kind}"] / found[f"sentence-transformers {theirs}"], 2)
        for label, (mine, theirs) in pairs.items()
        for kind in ("singles", "lists")
    }


if __name__ == "__main__":
    main()

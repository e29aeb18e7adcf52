"""The torch engine on a GPU: `shoal serve --engine torch` against sentence-transformers with the same weights.

Run by a Python with PyTorch, transformers and sentence-transformers: `.venv-parity/bin/python bench/gpu.py`. Without a
GPU it runs on the CPU, where `auto` is f32.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness import Server, check_lengths, medians, parser, phase, write, wrk_lines, wrk_threads
from workers import Workers

from shoal.bench.texts import WORDS, Bodies, Texts
from shoal.types import Array

METHOD = """
Random BERT models of two sizes (minilm: 6 layers of 384, base: 12 layers of 768; 12 heads, 30,522 tokens, 512
positions) with a WordPiece tokenizer, mean pooling and Normalize, saved once and loaded by both sides. `largest
cosine difference`: 1 - cosine to sentence-transformers in f32 on the same device, over texts of 5 to 100 tokens, sent
in lists of 32. `texts_per_s`: sentence-transformers in f32 and, on a GPU, fp16: `encode(batch_size=256)` of a list
in process, no HTTP, no JSON. Shoal: servers with `--engine torch`, precision `auto` (`served` says which it chose), no
limit of the queue, and different numbers of `--workers` and `--max-batch-size`, `kernel by kernel` with
`--no-cuda-graphs`; base64 answers, wrk on the same cores with a thread for every four of them, in a closed loop of so
many `clients` (connections) with one text or a list of 32 a request. All servers are started first, only one contender
works at a time, in turn in every round; every text is distinct and of exact length, 16 or 100 tokens. Medians over
rounds. `failed`: runs with errors, left out.
"""
SIZES = {"tiny": (2, 48), "minilm": (6, 384), "base": (12, 768)}
"""Layers and width."""

HEADS = 12
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPREAD = 0.05
"""Standard deviation of the weights, about that of a trained BERT."""

EXPECTED = 40_000, 96_000
"""Requests and texts a second for which there are bodies."""

PEER_TEXTS = {16: 8192, 100: 4096}
"""Texts of a call of sentence-transformers, by tokens."""

PACKAGES = ("shoal", "torch", "transformers", "sentence-transformers", "tokenizers", "numpy", "uvicorn", "uvloop")
QUEUE = {"max_queue_items": 100_000, "max_queue_ms": 0}


def save(size: str, folder: Path) -> Path:
    """Write a random model in sentence-transformers' layout, with a tokenizer that knows every word of the texts."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    layers, hidden = SIZES[size]
    encoder = folder / "encoder"
    encoder.mkdir(parents=True)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = dict.fromkeys([*SPECIAL, *WORDS, *letters, *(f"##{letter}" for letter in letters)])
    (encoder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    tokenizer = transformers.BertTokenizerFast(str(encoder / "vocab.txt"), model_max_length=512)
    tokenizer.save_pretrained(encoder)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * hidden,
        initializer_range=SPREAD,
    )
    transformers.BertModel(config).save_pretrained(encoder)
    parts = [modules.Transformer(str(encoder), max_seq_length=512), modules.Pooling(hidden), modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "model"), create_model_card=False)
    return folder / "model"


class Peer:
    """sentence-transformers in a dtype, on the GPU if there is one."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(folder), model_kwargs={"dtype": getattr(torch, dtype)})

    def encode(self, texts: list[str]) -> Array:
        found: Array = self._model.encode(texts, batch_size=256, convert_to_numpy=True, show_progress_bar=False)
        return found.astype(np.float64)

    def rate(self, texts: list[str]) -> float:
        """Texts a second."""
        start = time.perf_counter()
        self._model.encode(texts, batch_size=256, convert_to_numpy=True, show_progress_bar=False)
        return len(texts) / (time.perf_counter() - start)


def peers(folder: Path) -> dict[str, Peer]:
    import torch

    dtypes = {"f32": "float32", "fp16": "float16"} if torch.cuda.is_available() else {"f32": "float32"}
    return {f"sentence-transformers {name}": Peer(folder, dtype) for name, dtype in dtypes.items()}


class Torch(Workers):
    """`shoal serve --engine torch` of a folder, with models kept in `home`."""

    def __init__(self, folder: Path, home: Path, **settings: object) -> None:
        super().__init__(f"file:{folder}", engine="torch", home=home, **QUEUE, **settings)


def embed(server: Server, texts: list[str]) -> Array:
    """The vectors of `texts`, asked for in lists of 32."""
    rows = []
    for at in range(0, len(texts), 32):
        body = Bodies("openai", server.model, "base64", "").body(texts[at : at + 32])
        request = urllib.request.Request(server.url + "/v1/embeddings", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            answers = json.load(reply)["data"]
        rows += [np.frombuffer(base64.b64decode(answer["embedding"]), "<f4") for answer in answers]
    return np.stack(rows).astype(np.float64)


def distance(left: Array, right: Array) -> float:
    """The largest cosine distance of two rows with the same number."""
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float(np.max(1 - (left * right).sum(axis=1) / lengths))


def mixed_texts(count: int) -> list[str]:
    """Texts of 5 to 100 tokens, in this order again and again."""
    sources = [Texts(tokens, seed=11) for tokens in range(5, 101)]
    return [sources[number % len(sources)].take(1)[0] for number in range(count)]


def load(server: Server, source: Texts, clients: int, each: int, seconds: float) -> float:
    """Texts a second of a closed loop."""
    bodies = Bodies("openai", server.model, "base64", "")
    requests, texts = EXPECTED
    count = int(min(requests, texts / each) * (seconds + 0.5))
    lines = (bodies.body(source.take(each)) for _ in range(count))
    ran = wrk_lines(server, "/v1/embeddings", lines, clients, seconds, threads=wrk_threads())
    return each * float(ran["per_s"])


def measure(size: str, folder: Path, home: Path, arguments: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    sides = peers(folder)
    texts = mixed_texts(arguments.checked)
    right, *others = (side.encode(texts) for side in sides.values())
    distances = {name: distance(right, other) for name, other in zip(list(sides)[1:], others, strict=True)}
    with phase(f"{size}: shoal f32"), Torch(folder, home, precision="f32") as server:
        distances["shoal f32"] = distance(right, embed(server, texts))
    kinds = [(each, True) for each in arguments.servers] + [(each, False) for each in arguments.kernel_by_kernel]
    servers: dict[str, Server] = {}
    for (workers, batch), graphs in kinds:
        name = f"{workers} workers, batches of {batch}" + ("" if graphs else ", kernel by kernel")
        servers[name] = Torch(folder, home, workers=workers, max_batch_size=batch, cuda_graphs=graphs)
    with ExitStack() as stack:
        with phase(f"{size}: shoal auto, {len(servers)} servers"):
            one, *rest = servers.values()
            stack.enter_context(one)  # it checks the precision, once for all
            with ThreadPoolExecutor() as pool:
                list(pool.map(stack.enter_context, rest))
        with phase(f"{size}: warm shapes"):
            for server in servers.values():
                server.settle(arguments.warm_seconds)
        results["served"] = one.card() | {"id": size}
        for name, server in servers.items():
            distances[f"shoal auto, {name}"] = distance(right, embed(server, texts))
        results["vectors"] = {"largest cosine difference": distances}
        print(json.dumps(distances | {"served": results["served"]["precision"]}, indent=1), flush=True)
        for tokens in arguments.tokens:
            results[f"{tokens} tokens"] = compare(f"{size}, {tokens} tokens", tokens, sides, servers, arguments)
    return results


def compare(
    title: str, tokens: int, sides: dict[str, Peer], servers: dict[str, Server], arguments: Any
) -> dict[str, Any]:
    source = Texts(tokens, seed=time.time_ns())
    count = arguments.texts or PEER_TEXTS.get(tokens, 4096)
    failed: list[str] = []
    rounds = []

    def measure_load(kind: str, clients: int, each: int) -> dict[str, float]:
        name = f"shoal {kind}, {clients} clients, {each} a request"
        seconds = arguments.seconds if each == 1 else arguments.list_seconds
        try:
            return {name: load(servers[kind], source, clients, each, seconds)}
        except RuntimeError as error:
            failed.append(f"{name}: {error}")
            print(failed[-1], flush=True)
            return {}

    with phase(f"{title}: warm-up"):
        for side in sides.values():
            side.rate(source.take(max(256, count // 4)))
        for kind in servers:
            measure_load(kind, 64, 1)
    for number in range(arguments.rounds):
        with phase(f"{title}: round {number + 1}"):
            texts = source.take(count)
            found = {name: side.rate(texts) for name, side in sides.items()}
            for clients, each in arguments.loads:
                for kind in servers:
                    found |= measure_load(kind, clients, each)
            rounds.append(found)
            print(json.dumps(found), flush=True)
    figures = medians(rounds)
    best = max(figures[name] for name in sides)
    rows = {name: {"texts_per_s": value, "of_best_peer": round(value / best, 2)} for name, value in figures.items()}
    for name, row in rows.items():
        print(f"{name:64} {row['texts_per_s']:10.1f} {row['of_best_peer']:6.2f}", flush=True)
    return {"figures": rows, "rounds": rounds} | ({"failed": failed} if failed else {})


def pair(text: str) -> tuple[int, int]:
    first, second = map(int, text.split(":"))
    return first, second


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(seconds=2.0)
    options.add_argument("--sizes", nargs="+", default=["minilm", "base"], choices=list(SIZES))
    options.add_argument("--tokens", nargs="+", type=int, default=[16, 100])
    servers, loads = [(1, 64), (4, 64), (8, 256)], [(1, 1), (64, 1), (256, 1), (64, 32)]
    options.add_argument("--servers", nargs="+", type=pair, default=servers, help="WORKERS:MAX_BATCH_SIZE of each")
    kernel = [(1, 64), (4, 64)]
    options.add_argument("--kernel-by-kernel", nargs="*", type=pair, default=kernel, help="those without recordings")
    options.add_argument("--warm-seconds", type=float, default=60.0, help="most time to warm up")
    options.add_argument("--loads", nargs="+", type=pair, default=loads, help="CLIENTS:TEXTS, texts a request")
    options.add_argument("--list-seconds", type=float, default=3.0, help="length of a measurement with lists")
    options.add_argument("--texts", type=int, default=0, help="texts of a call of sentence-transformers")
    options.add_argument("--checked", type=int, default=960, help="texts whose vectors are compared")
    arguments = options.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    results: dict[str, Any] = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as place:
            folder = save(size, Path(place))
            results["tokens_checked"] = check_lengths(folder / "tokenizer.json", arguments.tokens)
            results[size] = measure(size, folder, Path(place) / "home", arguments)
            gc.collect()
        write("gpu", METHOD, results, PACKAGES)


if __name__ == "__main__":
    main()

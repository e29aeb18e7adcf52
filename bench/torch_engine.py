"""The torch engine behind Shoal's batcher against sentence-transformers: same weights, same texts, same process.

Run by a Python with PyTorch, transformers and sentence-transformers: `.venv-parity/bin/python bench/torch_engine.py`.
On a GPU it measures fp16 and f32, on a CPU f32.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import medians, parser, phase, write

from shoal.backends.local.engines import EngineOptions, load_opener
from shoal.bench.texts import WORDS, Texts
from shoal.core.scheduling.lane import Lane, LaneOptions
from shoal.core.scheduling.planner import Limits
from shoal.core.threads import Threads
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.spec import text_spec
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import TextSpec
from shoal.types import Array, Context, Embed, Embedded

METHOD = """
Random BERT models of the sizes of e5 and bge (base: 12 layers of 768, large: 24 of 1024; 30,522 tokens, 512 positions),
mean pooling and Normalize, saved once and loaded by both sides. Each round gives all contenders the same new distinct
texts of exact length, in turn. sentence-transformers: `encode(batch_size=64)` of the whole list, dtype as named. Shoal:
tokenising, batcher and torch engine in process without HTTP; `list` is one request with all texts, `singles` is 256
callers in a closed loop with one text each. Figures are texts/s, medians. `min_cosine`: Shoal's worst row to
sentence-transformers' in f32.
"""
SIZES = {"tiny": (2, 64), "base": (12, 768), "large": (24, 1024)}
HEAD = 64
"""Numbers that an attention head has."""

CALLERS = 256
PACKAGES = ("shoal", "torch", "transformers", "sentence-transformers", "tokenizers", "numpy")
DTYPES = {"f32": "float32", "fp16": "float16"}


def save(size: str, folder: Path) -> Path:
    """A random model as sentence-transformers saves it, with a tokenizer of which every bench word is one token."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    layers, hidden = SIZES[size]
    ids = {token: at for at, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    encoder = folder / "encoder"
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(encoder)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        intermediate_size=4 * hidden,
    )
    transformers.BertModel(config).save_pretrained(encoder)
    parts = [modules.Transformer(str(encoder), max_seq_length=512), modules.Pooling(hidden), modules.Normalize()]
    SentenceTransformer(modules=parts).save(str(folder / "model"), create_model_card=False)
    return folder / "model"


def spec_of(folder: Path) -> TextSpec:
    contract = read_contract(folder)
    return text_spec(contract, tokenizer="tokenizer.json", inputs=("input_ids", "attention_mask"), pooled="pooled")


class Peer:
    """sentence-transformers in a dtype."""

    def __init__(self, folder: Path, precision: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        kwargs = {"dtype": getattr(torch, DTYPES[precision])}
        self._model = SentenceTransformer(str(folder), model_kwargs=kwargs)

    def encode(self, texts: list[str]) -> Array:
        found: Array = self._model.encode(texts, batch_size=64, convert_to_numpy=True, show_progress_bar=False)
        return found


class ShoalLane(NamedTuple):
    lane: Lane

    async def list(self, texts: list[str]) -> Array:
        return await self._ask(texts)

    async def singles(self, texts: list[str]) -> Array:
        waiting = list(enumerate(texts))[::-1]
        found: dict[int, Array] = {}

        async def caller() -> None:
            while waiting:
                number, text = waiting.pop()
                found[number] = (await self._ask([text]))[0]

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return np.stack([found[number] for number in range(len(texts))])

    async def _ask(self, texts: list[str]) -> Array:
        context = Context(id="bench", deadline=time.monotonic() + 600)
        answer = await self.lane.run(Embed(model="bench", inputs=[*texts]), context)
        assert isinstance(answer, Embedded)
        return answer.vectors


async def opened(folder: Path, precision: str, threads: Threads) -> tuple[ShoalLane, dict[str, Any]]:
    spec = spec_of(folder)
    options = EngineOptions(precision=precision, spec=spec, warm_up_s=5.0)  # type: ignore[arg-type]
    engine = await load_opener("torch")(folder, name=f"bench-{precision}", options=options)
    pipeline = TextPipeline(folder, spec, truncate=True)
    lane = Lane(pipeline, [engine], LaneOptions(model="bench", limits=Limits(64, 16384)), threads=threads)
    return ShoalLane(lane), {name: engine.facts.details[name] for name in ("engine", "device", "attention")}


async def timed(run: Callable[[list[str]], Any], texts: list[str]) -> tuple[float, Array]:
    """Texts a second, and the vectors."""
    start = time.perf_counter()
    found = run(texts)
    vectors: Array = await found if asyncio.iscoroutine(found) else found
    return len(texts) / (time.perf_counter() - start), vectors


async def measure(folder: Path, options: Any, results: dict[str, Any], size: str) -> None:
    import torch

    precisions = ["fp16", "f32"] if torch.cuda.is_available() else ["f32"]
    threads = Threads("bench", 2)
    contenders: dict[str, Callable[[list[str]], Any]] = {}
    lanes = []
    for precision in precisions:
        contenders[f"sentence-transformers {precision}"] = Peer(folder, precision).encode
        own, facts = await opened(folder, precision, threads)
        results.update(facts)
        lanes.append(own.lane)
        contenders |= {f"shoal {precision} list": own.list, f"shoal {precision} singles": own.singles}
    for tokens in options.tokens:
        count = max(64, options.budget // tokens)
        source = Texts(tokens, seed=time.time_ns())
        for run in contenders.values():
            await timed(run, source.take(max(64, count // 4)))
        rounds, least = [], dict.fromkeys(contenders, 1.0)
        for number in range(options.rounds):
            with phase(f"{size}, {tokens} tokens: round {number + 1}, {count} texts"):
                texts = source.take(count)
                right: Array | None = None
                found = {}
                for name in ["sentence-transformers f32", *(each for each in contenders if not each.endswith("s f32"))]:
                    found[name], vectors = await timed(contenders[name], texts)
                    right = vectors if right is None else right
                    least[name] = min(least[name], float((right * vectors).sum(-1).min()))
                rounds.append(found)
        middle = medians(rounds)
        ratios = {
            f"{kind} {precision}": round(
                middle[f"shoal {precision} {kind}"] / middle[f"sentence-transformers {precision}"], 2
            )
            for precision in precisions
            for kind in ("list", "singles")
        }
        results[f"{size}, {tokens} tokens"] = {"texts_per_s": middle, "ratios": ratios, "min_cosine": least}
        print(json.dumps(ratios))
    for lane in lanes:
        await lane.aclose()
    threads.close()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", default=["base", "large"], choices=list(SIZES))
    options.add_argument("--tokens", nargs="+", type=int, default=[16, 64, 128, 512])
    options.add_argument("--budget", type=int, default=1_000_000, help="tokens a round")
    options.add_argument("--name", default="torch_engine", help="of the result's file")
    arguments = options.parse_args()
    results: dict[str, Any] = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as place:
            folder = save(size, Path(place))
            asyncio.run(measure(folder, arguments, results, size))
            gc.collect()
    write(arguments.name, METHOD, results, PACKAGES)


if __name__ == "__main__":
    main()

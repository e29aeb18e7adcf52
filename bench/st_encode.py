"""sentence-transformers' side of versus_st.py: a line of JSON in ({texts, precision}), a line out ({seconds}).

With {each, limit_s} too: so many texts a call, for so long; the answer has {texts, p50_ms} as well. With {vectors}: the
embeddings. `work` of the first line: about how many weights a token meets, those of its embedding left out.

Runs with a Python of its own and imports nothing of Shoal.
"""

import contextlib
import json
import os
import statistics
import sys
import time

import sentence_transformers
import torch
import transformers


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    model = sentence_transformers.SentenceTransformer(sys.argv[1], device="cpu")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["sentence-transformers"] = sentence_transformers.__version__
    facts = {"threads": torch.get_num_threads(), "dtype": str(next(model.parameters()).dtype), "versions": versions}
    weights = sum(each.numel() for each in model.parameters())
    tables = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Embedding))
    say(facts | {"parameters": weights, "work": weights - tables})
    for line in sys.stdin:
        request = json.loads(line)
        mixed = torch.autocast("cpu", torch.bfloat16) if request["precision"] == "bf16" else contextlib.nullcontext()
        texts, each = request["texts"], request.get("each", 0)
        with mixed:
            if request.get("vectors"):
                say({"vectors": model.encode(texts).tolist()})
            elif each:
                say(encode_for(model, request["limit_s"], texts, each))
            else:
                start = time.perf_counter()
                model.encode(texts, batch_size=32, show_progress_bar=False)
                say({"seconds": time.perf_counter() - start})


def encode_for(
    model: sentence_transformers.SentenceTransformer, limit_s: float, texts: list[str], each: int
) -> dict[str, float]:
    """Calls of `each` texts until the time is over, or the texts are."""
    calls = []
    start = time.perf_counter()
    while time.perf_counter() - start < limit_s and (len(calls) + 1) * each <= len(texts):
        at = time.perf_counter()
        model.encode(texts[len(calls) * each : (len(calls) + 1) * each], batch_size=each, show_progress_bar=False)
        calls.append(time.perf_counter() - at)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "texts": len(calls) * each, "p50_ms": statistics.median(calls) * 1000}


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""sentence-transformers' side of versus_st.py: a line of JSON in ({texts, precision}), a line out ({seconds}).

Runs with a Python of its own and imports nothing of Shoal.
"""

import contextlib
import json
import os
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
    say({"threads": torch.get_num_threads(), "dtype": str(next(model.parameters()).dtype), "versions": versions})
    for line in sys.stdin:
        request = json.loads(line)
        mixed = torch.autocast("cpu", torch.bfloat16) if request["precision"] == "bf16" else contextlib.nullcontext()
        with mixed:
            start = time.perf_counter()
            model.encode(request["texts"], batch_size=32, show_progress_bar=False)
            seconds = time.perf_counter() - start
        say({"seconds": seconds})


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

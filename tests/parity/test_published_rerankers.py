"""Rerankers made from language models, with no more files than their authors published, score as their model cards do.

The cards' formulas are written out here over transformers: the prompt, the parts that are tokenized apart, the cut, the
padding on the left and the answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shoal.backends import parse_address
from shoal.backends.local.open import LocalModel, open_local
from shoal.config.settings import Settings
from shoal.models.convert.contract import published_reranker
from shoal.types import Array, Rerank
from tests.parity.family_models import MODELS, shake
from tests.parity.test_cross_encoders import DOCUMENTS, QUERY, close, scores

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

INSTRUCTION = "Find fish?"
QWEN3_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
BGE_PROMPT = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing a "
    "prediction of either 'Yes' or 'No'."
)
MXBAI_START = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n"
)
MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each query-document "
    "pair, carefully analyze the semantic relationship between them, then provide your binary relevance judgment (0 "
    "for not relevant, 1 for relevant).\nRelevance:"
)
MXBAI_END = "<|im_end|>\n<|im_start|>assistant\n"

Encode = Callable[[str], list[int]]


def qwen3_ids(encode: Encode, bos: int, positions: int, query: str, document: str, instruction: str) -> list[int]:
    start, end = encode(QWEN3_START), encode(QWEN3_END)
    task = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    body = encode(f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}")
    return start + body[: min(8192, positions) - len(start) - len(end)] + end


def bge_ids(encode: Encode, bos: int, positions: int, query: str, document: str, instruction: str) -> list[int]:
    longest, line = 1024, encode("\n")
    first = [bos, *encode(f"A: {query}")[: longest * 3 // 4]]
    second = [*line, *encode(f"B: {document}")[:longest]][: longest - len(first)]
    return first + second + line + encode(instruction or BGE_PROMPT)


def mxbai_ids(encode: Encode, bos: int, positions: int, query: str, document: str, instruction: str) -> list[int]:
    start, line, task, end = (encode(text) for text in (MXBAI_START, "\n", MXBAI_TASK, MXBAI_END))
    longest = min(8192, positions - len(start + line + task + end))
    before = f"instruction: {instruction}\n" if instruction else ""
    first = encode(f"{before}query: {query}")[: longest * 3 // 4]
    second = [*line, *encode(f"document: {document}")][: longest - len(first)]
    return start + first + second + line + task + end


class Card(NamedTuple):
    """`regex`: whether the tokenizer splits words before it merges, as Qwen's does; without, as Gemma's, tokens join
    the parts of the prompt if these are not tokenized apart."""

    family: str
    kind: str
    folder: str
    fragment: str
    positions: int
    ids: Callable[[Encode, int, int, str, str, str], list[int]]
    answers: tuple[str, ...]
    regex: bool = False


CARDS = {
    "qwen3": Card("qwen3", "Qwen3ForCausalLM", "Qwen3-Reranker-0.6B", "", 400, qwen3_ids, ("yes", "no"), regex=True),
    "bge": Card("gemma", "GemmaForCausalLM", "model", "", 1200, bge_ids, ("Yes",)),
    "mxbai": Card("qwen2", "Qwen2ForCausalLM", "mine", "#reranker=mxbai", 420, mxbai_ids, ("1", "0")),
}


def tokenizer_of(*, regex: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    made.decoder = decoders.ByteLevel()
    words = [QWEN3_START, BGE_PROMPT, MXBAI_TASK, "yes no Yes No 1 0", *(f"{text[:99]}\nB: " for text in DOCUMENTS)]
    special = ["<|pad|>", "<bos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(words * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", bos_token="<bos>", eos_token="<|im_end|>", padding_side="left"
    )


def published(tmp_path: Path, card: Card) -> Path:
    """Write the files that the authors published: a language model and its tokenizer, nothing else."""
    import torch

    tokenizer, folder = tokenizer_of(regex=card.regex), tmp_path / card.folder
    torch.manual_seed(5)
    model = MODELS[card.family](len(tokenizer), card.kind, max_position_embeddings=card.positions)
    shake(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if card.folder == "model":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "BAAI/bge-reranker-v2-gemma"}))
    assert not (folder / "modules.json").exists() and (folder / "generation_config.json").exists()
    return folder


def card_logits(folder: Path, card: Card, pairs: Sequence[tuple[str, str]], instruction: str = "") -> Array:
    """Return the card's logits of each answer, float64 [pairs, answers], of texts padded on the left.

    Short and long texts are in batches of their own: a thousand tokens of padding move the positions of a short text so
    far that their angles, float32 in transformers, change its scores by 1e-5.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    # Not AutoTokenizer: the family's class would replace the test's way to split words.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    rows = [card.ids(encode, tokenizer.bos_token_id, card.positions, *pair, instruction) for pair in pairs]
    found: dict[int, Array] = {}
    for long in (False, True):
        places = [place for place, row in enumerate(rows) if (len(row) > 500) == long]
        if places:
            batch = tokenizer.pad({"input_ids": [rows[place] for place in places]}, return_tensors="pt")
            with torch.no_grad():
                found |= zip(places, model(**batch).logits[:, -1, :].numpy(), strict=True)
    answers = [encode(word)[0] for word in card.answers]
    return np.stack([found[place][answers] for place in range(len(rows))])


def opened(folder: Path, card: Card, home: Path, engine: Any) -> LocalModel:
    settings = Settings(home=str(home), offline=True, engine=engine, precision="f32", truncate=True)
    return asyncio.run(open_local("m", [parse_address(f"file:{folder}{card.fragment}")], settings))


def pairs_of(card: Card) -> list[tuple[str, str]]:
    """Return pairs of mixed lengths, with cut documents and, where the card cuts it, a cut query."""
    pairs = [(QUERY, document) for document in (*DOCUMENTS, "renew a passport, " * 300)]
    return pairs if card.regex else [*pairs, ("where? ", "\nhere"), ("passport " * 900, "renew " * 900)]


@pytest.mark.parametrize("engine", ["openvino", "torch"])
@pytest.mark.parametrize("name", CARDS)
def test_scores_are_those_of_the_card(tmp_path: Path, name: str, engine: str) -> None:
    card = CARDS[name]
    folder, pairs = published(tmp_path, card), pairs_of(card)
    local = opened(folder, card, tmp_path / "home", engine)
    assert "agrees with a numpy forward pass" in local.facts.verified
    assert local.facts.takes_instruction and "rerank" in local.facts.tasks
    for instruction in (None, INSTRUCTION):
        logits = card_logits(folder, card, pairs, instruction or "")
        raw = logits[:, 0] - logits[:, 1] if len(card.answers) == 2 else logits[:, 0]
        whole = 1 / (1 + np.exp(-raw))
        assert np.ptp(whole) > 0.01
        task = Rerank(model="m", queries=[], documents=[], instruction=instruction)
        close(scores(local, task, pairs), whole)
        task = Rerank(model="m", queries=[], documents=[], instruction=instruction, raw_scores=True)
        close(scores(local, task, pairs), raw)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "another instruction": ("qwen3", {"texts": {**published_reranker._QWEN3.texts, "instruction": "Given a query"}}),
    "no empty thought": ("qwen3", {"texts": {**published_reranker._QWEN3.texts, "end": "<|im_end|>\n"}}),
    "one answer only": ("qwen3", {"answers": ("yes",)}),
    "parts tokenized as one text": (
        "bge",
        {"source": published_reranker._BGE.source.replace("\x1e", ""), "query_share": None},
    ),
    "no first token": ("bge", {"source": published_reranker._BGE.source.replace("{{ bos_token }}", "")}),
    "swapped answers": ("mxbai", {"answers": ("0", "1")}),
}
"""A form each, and a mistake in it."""


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_form_gives_other_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """The tolerance of the test above is far below what a mistake changes."""
    name, changes = WRONG[mistake]
    card = CARDS[name]
    folder = published(tmp_path, card)
    wrong = published_reranker._FORMS[name]._replace(**changes)
    monkeypatch.setitem(published_reranker._FORMS, name, wrong)
    pairs = [(QUERY, document) for document in DOCUMENTS[:4]]
    logits = card_logits(folder, card, pairs)
    raw = logits[:, 0] - logits[:, 1] if len(card.answers) == 2 else logits[:, 0]
    local = opened(folder, card, tmp_path / "home", "openvino")
    found = scores(local, Rerank(model="m", queries=[], documents=[], raw_scores=True), pairs)
    assert np.abs(found.ravel() - raw).max() > 1e-3

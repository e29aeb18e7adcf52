"""English-like texts of an exact length in tokens, every one different from every other.

Each word of WORDS is one token of the uncased BERT vocabulary, so a text of n words has n + 2 tokens there ([CLS] and
[SEP]); `bench/` checks it with the model's own tokenizer.
"""

from __future__ import annotations

import json
import random
from typing import Literal

Surface = Literal["openai", "tei", "embedding"]
Encoding = Literal["float", "base64"]

_LIST = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said
what its about than into them can only other time new some could these two may first then do any like my
now over such our man me even most made after also did many off before must well back through years
where much your way down should because long each just state those people too mr how little good world
make very year still see own work men day get here old life both between being under three never know
same last another while us might great go come since against right came take used himself few house
american use place during high without again home around small however found mrs part school thought
went say general once upon war left water fact number system city need course almost point hand
government head set light order night face room public given family young large until always far early
want called better side eyes think power later present second already business enough church different
important country form land problem held community question able line above possible white best real
money seem turn field story member today lost sound road close local report street single music open
plan morning paper river table ground glass stone
"""
WORDS = tuple(_LIST.split())
HEAD = 3
"""Words that spell a text's number; the rest is drawn from a pool of tails."""

LIMIT = len(WORDS) ** HEAD
"""How many distinct texts one length has."""

_TAILS = 4093
PATHS: dict[Surface, str] = {"openai": "/v1/embeddings", "tei": "/embed", "embedding": "/v1/embedding"}


class Texts:
    """Text number n, for n in 0..LIMIT-1: the same for the same (tokens, seed), different for every n.

    `tokens` counts the two special tokens, at least HEAD + 2. Raises ValueError when it is shorter.
    """

    def __init__(self, tokens: int, seed: int = 0) -> None:
        words = tokens - 2
        if words < HEAD:
            raise ValueError(f"distinct texts need at least {HEAD + 2} tokens: got {tokens}")
        draw = random.Random(f"{seed}/{tokens}")
        self._words = draw.sample(WORDS, len(WORDS))
        count = words - HEAD
        self._tails = ["".join(f" {word}" for word in draw.choices(WORDS, k=count)) for _ in range(_TAILS)]
        self._next = 0

    def text(self, number: int) -> str:
        words, base = self._words, len(self._words)
        number %= LIMIT
        head = f"{words[number % base]} {words[number // base % base]} {words[number // base**2]}"
        return head + self._tails[number % _TAILS]

    def take(self, count: int) -> list[str]:
        """The next `count` texts."""
        start = self._next
        self._next += count
        return [self.text(start + n) for n in range(count)]


class Bodies:
    """Ready HTTP/1.1 requests for one surface, each with texts that no other has."""

    def __init__(self, surface: Surface, model: str, encoding: Encoding, host: str, headers: str = "") -> None:
        self._surface = surface
        self._model = json.dumps(model)
        self._encoding = encoding
        self._start = f"POST {PATHS[surface]} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{headers}"

    def body(self, texts: list[str]) -> bytes:
        """The JSON body; a single text is sent as a string where the surface has that form."""
        if self._surface == "embedding":
            return json.dumps([{"query": text} for text in texts], separators=(",", ":")).encode()
        inputs = f'"{texts[0]}"' if len(texts) == 1 else '["' + '","'.join(texts) + '"]'
        if self._surface == "tei":
            return f'{{"inputs":{inputs}}}'.encode()
        return f'{{"model":{self._model},"input":{inputs},"encoding_format":"{self._encoding}"}}'.encode()

    def request(self, texts: list[str]) -> bytes:
        body = self.body(texts)
        return f"{self._start}content-length: {len(body)}\r\n\r\n".encode() + body

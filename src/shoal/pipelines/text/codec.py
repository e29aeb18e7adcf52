"""Tokenize and detokenize for clients: tokens with their offsets, and ids back to text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.core.protocols import Token
from shoal.errors import InvalidValue, TooLong
from shoal.pipelines.text import prompts
from shoal.pipelines.text.token_ids import find_unknown_id
from shoal.pipelines.text.tokenizer import TextTokenizer

CHUNK_CHARS = 65_536
"""Characters per chunk of a long text. With offsets, tokenizing holds the GIL at times."""
MOST_CHARS = 524_288
"""Maximum characters of one request, prompts included. Texts are not cut, and a token takes nearly a kilobyte to
report."""
INLINE_CHARS = 512
INLINE_IDS = 512


class TokenizerCodec:
    """TextCodec over a TextTokenizer; large jobs run in a thread.

    Texts are not cut. The prompt (the default one if none is named) is tokenized with the text, and offsets count its
    characters.
    """

    def __init__(self, tokenizer: TextTokenizer, spec: prompts.HasPrompts) -> None:
        self._tokenizer = tokenizer
        self._spec = spec

    async def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool, prompt_name: str | None
    ) -> list[list[Token]]:
        """Raises InvalidValue for a prompt that the model does not have, TooLong for more than MOST_CHARS."""
        prompt = prompts.resolve_prompt(self._spec, prompt_name, None)
        size = sum(map(len, texts)) + len(texts) * len(prompt)
        if size > MOST_CHARS:
            raise TooLong(
                f"the texts have {size} characters, but at most {MOST_CHARS} are tokenized at once; send them in parts",
                param="inputs",
            )
        if size + len(texts) * 16 <= INLINE_CHARS:
            return self._tokenize(texts, prompt, add_special_tokens)
        return await asyncio.to_thread(self._tokenize, texts, prompt, add_special_tokens)

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Raises InvalidValue for an id outside the vocabulary."""
        if sum(map(len, ids)) <= INLINE_IDS:
            return self._decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self._decode, ids, skip_special_tokens)

    def _tokenize(self, texts: Sequence[str], prompt: str, add_special_tokens: bool) -> list[list[Token]]:
        before = self._frame(self._tokenizer.prefix) if add_special_tokens else []
        after = self._frame(self._tokenizer.suffix) if add_special_tokens else []
        return [[*before, *self._tokens(prompt + text), *after] for text in texts]

    def _tokens(self, text: str) -> list[Token]:
        raw = self._tokenizer.raw
        tokens: list[Token] = []
        start = 0
        for chunk in self._tokenizer.chunks(text, CHUNK_CHARS):
            encoding = raw.encode_batch([chunk], add_special_tokens=False)[0]
            tokens += [
                Token(i, chunk[a:b], False, start + a, start + b)
                for i, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)
            ]
            start += len(chunk)
        return tokens

    def _frame(self, ids: Sequence[int]) -> list[Token]:
        return [Token(i, self._tokenizer.raw.id_to_token(i) or "", True, None, None) for i in ids]

    def _decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        size = self._tokenizer.vocab_size
        for one in ids:
            bad = find_unknown_id(one, size)
            if bad is not None:
                raise InvalidValue(f"token id {bad} is outside the vocabulary (0 to {size - 1})", param="ids")
        return self._tokenizer.raw.decode_batch([list(one) for one in ids], skip_special_tokens=skip_special_tokens)

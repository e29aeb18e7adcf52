"""Which replica of a language model gets a request: requests that begin alike go to one replica, whose server has the
beginning in its prefix cache. Pure.

Replicas are ranked for a key by rendezvous hashing (Thaler and Ravishankar, 1996): when one comes or goes, only its own
keys move. Load is bounded as in "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup and Zadimoghaddam, 2017): the
first replica of the rank that is not too busy gets the request. Load is tokens in flight, of prompts and of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from shoal.types import Context, Generate, Part

Routing = Literal["session", "prefix", "load"]
"""`session`: by the session that the client names. `prefix`: else by the beginning of the prompt. `load`: by none."""

BOUND = 1.25
"""Load of a replica, relative to the mean of all, up to which it keeps its keys."""
FREE_REQUESTS = 8
"""Requests in flight that a replica always keeps its keys for: of a few, the mean says nothing."""
PREFIX_CHARS = 1024
"""Characters of a prompt that decide. A few hundred tokens are worth the cache of another replica."""
CHARS_PER_TOKEN = 4
ANSWER_TOKENS = 256
"""Assumed length of an answer whose request sets no limit, and the most that a limit counts for: most answers end
before."""
_SESSION_FIELDS = ("prompt_cache_key", "user")
_SESSION_FIELDS_OF = {"anthropic.messages": ("metadata",)}
"""By dialect, where another field names the session: in OpenAI's, `metadata` may be anything."""


class Demand(NamedTuple):
    """What a request asks of a replica. `key`: equal for requests that belong together; b"" if nothing is known."""

    key: bytes
    tokens: int


NO_DEMAND = Demand(b"", 0)


class Load(NamedTuple):
    """What a replica has in flight. `last_pick`: the number of its last request."""

    requests: int
    tokens: int
    last_pick: int


def estimate_demand(task: Generate, ctx: Context, routing: Routing) -> Demand:
    """Return the demand of a task. A session is the header `x-session-id`, else OpenAI's `prompt_cache_key` or `user`,
    or Anthropic's `metadata`. The beginning of a conversation is its first messages, the first one of a user included,
    which later turns repeat."""
    most = task.sampling.max_tokens
    answer = ANSWER_TOKENS if most is None else min(most, ANSWER_TOKENS)
    tokens = _count_chars(task) // CHARS_PER_TOKEN + answer * task.choices
    if routing == "load":
        return Demand(b"", tokens)
    key = ctx.session.encode() or _session_field(task)
    if not key and routing == "prefix":
        key = _prompt_start(task)
    return Demand(key and task.adapter.encode() + b"\0" + key, tokens)


def choose(names: Sequence[str], loads: Sequence[Load], demand: Demand) -> int:
    """Return the index of the replica for a request, of those with these names and loads: the first one of the key's
    rank that is not too busy; without a key, the one with the fewest tokens in flight, in turns."""
    if len(names) == 1:
        return 0
    if demand.key:
        bound = BOUND * (sum(load.tokens for load in loads) + demand.tokens) / len(loads)
        for index in rank(names, demand.key):
            if loads[index].requests < FREE_REQUESTS or loads[index].tokens + demand.tokens <= bound:
                return index
    return min(range(len(loads)), key=lambda index: _busy(loads[index]))


def rank(names: Sequence[str], key: bytes) -> list[int]:
    """Return the indices of replicas in the order in which a key prefers them."""
    weights = [blake2b(name.encode() + b"\0" + key, digest_size=8).digest() for name in names]
    return sorted(range(len(names)), key=weights.__getitem__, reverse=True)


def _busy(load: Load) -> tuple[int, int, int]:
    return load.tokens, load.requests, load.last_pick


def _session_field(task: Generate) -> bytes:
    dialect, fields = ("", {}) if task.raw is None else task.raw
    names = _SESSION_FIELDS_OF.get(dialect, _SESSION_FIELDS)
    found = [bytes(fields[name]) for name in names if name in fields]
    return next((value for value in found if value not in (b"null", b'""')), b"")


def _prompt_start(task: Generate) -> bytes:
    if task.prompts:
        prompt = task.prompts[0]
        if isinstance(prompt, str):
            return prompt[:PREFIX_CHARS].encode(errors="replace")
        return repr(prompt[: PREFIX_CHARS // CHARS_PER_TOKEN]).encode()
    texts: list[str] = []
    for message in task.messages:
        texts += (message.role, *_texts(message.content))
        if message.role == "user":
            break
    return "\0".join(texts)[:PREFIX_CHARS].encode(errors="replace")


def _texts(content: str | list[Part] | None) -> list[str]:
    return [content] if isinstance(content, str) else [part.text or part.url for part in content or ()]


def _count_chars(task: Generate) -> int:
    size = sum(len(each) * (1 if isinstance(each, str) else CHARS_PER_TOKEN) for each in task.prompts)
    for message in task.messages:
        content = message.content
        size += len(content) if isinstance(content, str) else sum(len(part.text) for part in content or ())
    return size

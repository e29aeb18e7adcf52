"""Reasoning as clients show it and send it back."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import NamedTuple

from shoal.surfaces.openai.responses import wire

ENCRYPTED = "reasoning.encrypted_content"
_MARK = "shoal."


class ReasoningForm(NamedTuple):
    """`summarizes`: reasoning is shown as a summary, too. `seals`: also as the text that clients send back unread."""

    summarizes: bool = False
    seals: bool = False


def find_form(payload: wire.ResponsesRequest) -> ReasoningForm:
    """Return the forms that a request asks for."""
    summary = payload.reasoning.get_summary() if payload.reasoning is not None else None
    return ReasoningForm(summary not in (None, "none"), ENCRYPTED in (payload.include or ()))


def seal(text: str) -> str:
    """Return reasoning in the form of encrypted content. It is not encrypted, since its client may read it anyway:
    clients that store nothing here send no other form of it back."""
    return _MARK + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str:
    """Return the reasoning in encrypted content; "" for another server's, which only that can read."""
    if not sealed.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def join_texts(parts: str | Sequence[wire.ContentPart] | None, separator: str = "") -> str:
    """Return the text of the parts of reasoning or of its summary."""
    return "" if parts is None or isinstance(parts, str) else separator.join(part.text or "" for part in parts)

"""The tokenizer of a model whose server reads text."""

from __future__ import annotations

from shoal.config.settings import ModelTable, Settings
from shoal.models.remote_text_models import tokenizer_folder
from shoal.models.sources import Access
from shoal.models.store import Store
from shoal.models.tokenizer_file import TOKENIZER
from shoal.pipelines.text.tokenizer import TextTokenizer


def load_tokenizer(settings: Settings, table: ModelTable) -> TextTokenizer | None:
    """Load the tokenizer that the table names, to count tokens and show them; None without one. Blocks."""
    if table.tokenizer is None:
        return None
    access = Access(offline=settings.offline, hf_token=settings.hf_token)
    return TextTokenizer(tokenizer_folder(table.tokenizer, store=Store(settings.home), access=access), TOKENIZER)

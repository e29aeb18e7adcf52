"""Tiny random models for the torch engine: saved by transformers, served from the folder, computed by a second path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shoal.specs import TextSpec
from shoal.types import Array
from tests.contract.engines.tiny import OUTPUTS, VOCAB

INPUTS = ("input_ids", "attention_mask")


class TinyBert:
    """The model for tests/contract/engines, as a BERT in a folder: mean pooling, then Normalize. Its expected outputs
    are computed in double precision, text by text and without padding."""

    def __init__(self, folder: Path, *, width: int = 32, layers: int = 2, positions: int = 512) -> None:
        import torch
        import transformers

        torch.manual_seed(7)
        config = transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=2 * width,
            max_position_embeddings=positions,
            initializer_range=width**-0.5,
        )
        model = transformers.BertModel(config)
        model.save_pretrained(folder)
        self.folder = folder
        self.spec = TextSpec(
            tokenizer="tokenizer.json",
            inputs=INPUTS,
            dimension=width,
            max_tokens=positions,
            vocab_size=VOCAB,
            modules=(),
            ends_normalized=False,
        )
        self._model = model.double().eval()

    def answer(self, inputs: dict[str, Array]) -> dict[str, Array]:
        import torch

        rows = []
        with torch.inference_mode():
            for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
                unpadded = torch.from_numpy(ids[mask > 0])[None]
                vector = self._model(unpadded).last_hidden_state[0].mean(0).numpy() if unpadded.shape[1] else None
                rows.append(np.zeros(self.spec.dimension) if vector is None else vector)
        pooled = np.stack(rows)
        unit = pooled / np.maximum(np.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
        return dict(zip(OUTPUTS, (unit, pooled), strict=True))


def modules(folder: Path, *entries: tuple[str, str], config: dict[str, Any] | None = None) -> None:
    """Write a modules.json of (kind, path)."""
    import json

    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(entries)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))

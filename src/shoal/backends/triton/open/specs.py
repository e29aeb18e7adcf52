"""Finds the TextSpec of a model on Triton: in local files, in the entry that Shoal wrote, or from its tokenizer's
source and the model's table."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.backends import parse_address
from shoal.backends.base.prompts import apply_prompts, override_prompts
from shoal.backends.triton.open.scores import gives_scores, read_head, score_spec
from shoal.backends.triton.open.targets import TritonTarget
from shoal.backends.triton.schema import SENTENCE, SPARSE, TOKENS, Embedder
from shoal.errors import ConfigError, ModelFileError
from shoal.models.prepare import SOURCE
from shoal.models.remote_text_models import Overrides, foreign_spec, spec_from_parameters, tokenizer_folder
from shoal.models.sources import Access
from shoal.models.space import stored_space
from shoal.models.store import Store
from shoal.models.tokenizer_file import TOKENIZER as TOKENIZER_FILE
from shoal.pipelines.text.tokenizer import fingerprint, read_tokenizer
from shoal.specs import ScoreSpec, SparseSpec, TextSpec

logger = logging.getLogger("shoal.triton")


class SpecSource(NamedTuple):
    """A TextSpec, and the `folder` of the tokenizer. `space` "": unknown. `head`: the scores that the
    tokenizer's files define, for a model that Shoal did not make."""

    folder: Path
    spec: TextSpec
    space: str = ""
    head: ScoreSpec | None = None


def find_spec(target: TritonTarget, embedder: Embedder) -> SpecSource:
    """Return how a model that reads tokens maps texts to tensors, and its outputs to vectors or scores.

    Blocks. Raises SetupError, and ConfigError that names the key of the table to set if information is missing.
    """
    table, written = target.table, embedder.parameters.get("shoal_text")
    space = embedder.parameters.get("shoal_space", "")
    if target.stored is not None:
        stored = apply_prompts(target.stored, table)
        if stored is not target.stored:
            space = stored_space(stored)
        return SpecSource(stored.path, drop_missing_heads(target.name, stored.manifest.text_spec, embedder), space)
    if written:
        spec = spec_from_parameters(written)
        own = override_prompts(target.name, spec, table)
        if own != spec and space:
            identity = [space, sorted(own.prompts.items()), own.default_prompt_name]
            space = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:16]
        if table.tokenizer is None:
            folder = _written_folder(target, embedder)
        else:
            folder = tokenizer_folder(table.tokenizer, store=open_store(target), access=make_access(target))
        check_tokenizer(target, embedder, folder, spec)
        return SpecSource(folder, drop_missing_heads(target.name, own, embedder), space)
    if table.tokenizer is None:
        raise ConfigError(
            f"{target.name} takes token ids and needs a tokenizer: set `tokenizer` in "
            f'[models."{target.name}"] of shoal.toml, as "hf:org/name" or a folder'
        )
    return _spec_from_tokenizer(target, embedder, table.tokenizer)


def check_tokenizer(target: TritonTarget, embedder: Embedder, folder: Path, spec: TextSpec) -> None:
    """Raise ConfigError for a tokenizer that makes other ids than the one that the entry was written with, if the entry
    records it. Blocks."""
    stored_fingerprint = embedder.parameters.get("shoal_tokenizer", "")
    file = spec.tokenizer if target.table.tokenizer is None else TOKENIZER_FILE
    size = read_tokenizer(folder, file).get_vocab_size(with_added_tokens=True)
    if stored_fingerprint and stored_fingerprint != fingerprint(folder, file):
        why = "makes other token ids than the one that the model was written with"
    elif 0 < spec.vocab_size < size:
        why = f"has {size} tokens, but the model has {spec.vocab_size}"
    else:
        return
    source = embedder.parameters.get("shoal_source", "")
    remedy = (
        f'leave `tokenizer` out of [models."{target.name}"] (its own tokenizer is that of {source})'
        if target.table.tokenizer is not None
        else "load the model through Shoal again"
    )
    raise ConfigError(f"{target.name}: the tokenizer of {target.table.tokenizer or source} {why}: {remedy}")


def drop_missing_heads(name: str, spec: TextSpec, embedder: Embedder) -> TextSpec:
    """Return the spec without heads whose outputs the served graph lacks. Raises ConfigError if none is left."""
    names = {port.canonical for port in embedder.outputs}
    changes: dict[str, Any] = {}
    if spec.tokens not in names:
        changes["tokens"] = ""
    if spec.sparse is not None and spec.sparse.output not in names:
        changes["sparse"] = None
    if spec.multi is not None and spec.multi.output not in names:
        changes["multi"] = None
    left = msgspec.structs.replace(spec, **changes)
    if not left.kinds and (left.score is None or left.score.output not in names):
        raise ConfigError(
            f"{name} returns {', '.join(sorted(names))}, but was written to return {', '.join(spec.outputs)}: load it "
            "through Shoal again"
        )
    return left


def open_store(target: TritonTarget) -> Store:
    return Store(target.settings.home)


def make_access(target: TritonTarget) -> Access:
    return Access(offline=target.settings.offline, hf_token=target.settings.hf_token)


def _written_folder(target: TritonTarget, embedder: Embedder) -> Path:
    """Return the folder with the tokenizer of Shoal's entry: the stored model, else fetched without the weights."""
    address = parse_address(embedder.parameters.get("shoal_source", ""))
    stored = open_store(target).find(address)
    if stored is not None:
        return stored.path
    try:
        return tokenizer_folder(address, store=open_store(target), access=make_access(target))
    except ModelFileError as error:
        # Static models and some heads must be prepared as a whole to find the tokenizer.
        logger.info("%s: preparing all of %s to get the tokenizer (%s)", target.name, address, error.message)
        return target.prepare(address).path


def _spec_from_tokenizer(target: TritonTarget, embedder: Embedder, source: str) -> SpecSource:
    table = target.table
    folder = tokenizer_folder(source, store=open_store(target), access=make_access(target))
    head = None if table.labels and table.activation else read_head(folder / SOURCE)
    scores = gives_scores(embedder, head)
    outputs = [port.canonical for port in embedder.outputs]
    dense = [name for name in outputs if name != SPARSE]
    found = foreign_spec(
        source,
        store=open_store(target),
        inputs=[port.canonical for port in embedder.inputs],
        outputs=[SENTENCE] if scores or not dense else dense,
        dimension=0 if scores or not dense else embedder.dimension or 0,
        overrides=Overrides(
            pooling=table.pooling,
            max_tokens=table.max_tokens,
            prompts=table.prompts or None,
            default_prompt_name=table.default_prompt_name,
        ),
        access=make_access(target),
    )
    for note in found.notes:
        logger.warning("%s: %s", target.name, note)
    changes: dict[str, Any] = {}
    if scores:
        score = score_spec(target.name, table, embedder, head, embedder.dimension)
        changes = {"dimension": 0, "modules": (), "score": score}
    if SPARSE in outputs:
        changes |= {"sparse": SparseSpec(output=SPARSE)} | ({} if dense else {"dimension": 0})
    if TOKENS in outputs and embedder.level == "sentence" and not scores:
        changes["tokens"] = TOKENS
    return SpecSource(folder, msgspec.structs.replace(found.spec, **changes), head=head)

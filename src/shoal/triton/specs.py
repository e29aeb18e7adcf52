"""Where the TextSpec of a model on Triton comes from: files here, what Shoal wrote into its entry, or its tokenizer's
source and the model's table."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.backends.triton.schema import SENTENCE, SPARSE, TOKENS, Embedder
from shoal.errors import ConfigError, ModelFileError
from shoal.local import prepare_local, prompted
from shoal.local import space_of as space_of_stored
from shoal.models.address import parse_address
from shoal.models.foreign import Overrides, foreign_spec, spec_from_parameters, tokenizer_folder
from shoal.models.prepare import SOURCE
from shoal.models.sources import Access
from shoal.models.store import Store
from shoal.settings import ModelTable
from shoal.specs import ScoreSpec, SparseSpec, TextSpec
from shoal.triton.scores import gives_scores, head_of, score_spec
from shoal.triton.targets import Wanted

logger = logging.getLogger("shoal.triton")


class Specified(NamedTuple):
    """`folder` holds the tokenizer. `space` "": that of the model is not known. `head`: what its files say of scores,
    for one that Shoal did not make."""

    folder: Path
    spec: TextSpec
    space: str = ""
    head: ScoreSpec | None = None


def specified(wanted: Wanted, embedder: Embedder) -> Specified:
    """How texts become the tensors of a model that reads tokens, and its outputs vectors or scores.

    Blocks. Raises SetupError, and ConfigError with the key of the table to set for what nobody says.
    """
    table, written = wanted.table, embedder.parameters.get("shoal_text")
    space = embedder.parameters.get("shoal_space", "")
    if wanted.stored is not None:
        stored = prompted(wanted.stored, table)
        if stored is not wanted.stored:
            space = space_of_stored(stored)
        return Specified(stored.path, given(wanted.name, stored.manifest.text_spec, embedder), space)
    if written and table.tokenizer is None:
        spec = spec_from_parameters(written)
        own = with_prompts(wanted.name, spec, table)
        if own != spec and space:
            told = [space, sorted(own.prompts.items()), own.default_prompt_name]
            space = hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16]
        return Specified(_written_folder(wanted, embedder), given(wanted.name, own, embedder), space)
    if table.tokenizer is None:
        raise ConfigError(
            f"{wanted.name} takes token ids, and nothing says which tokenizer makes them: set `tokenizer` in "
            f'[models."{wanted.name}"] of shoal.toml, as "hf:org/name" or a folder'
        )
    return _foreign(wanted, embedder, table.tokenizer)


def given(name: str, spec: TextSpec, embedder: Embedder) -> TextSpec:
    """Without heads whose outputs the served graph lacks. Raises ConfigError where nothing is left."""
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
            f"{name} gives {', '.join(sorted(names))}, and was written to give {', '.join(spec.outputs)}: load it "
            "through Shoal again"
        )
    return left


def with_prompts(name: str, spec: TextSpec, table: ModelTable) -> TextSpec:
    """With the prompts of its table above the model's own, as `local.prompted` has it for files that are here."""
    if spec.score is not None or not (table.prompts or table.default_prompt_name):
        return spec
    prompts = {**spec.prompts, **table.prompts}
    default = table.default_prompt_name or spec.default_prompt_name
    if default is not None and default not in prompts:
        raise ConfigError(
            f"default_prompt_name: {default!r} is no prompt of {name}: it has {', '.join(sorted(prompts)) or 'none'}"
        )
    return msgspec.structs.replace(spec, prompts=prompts, default_prompt_name=default)


def store_of(wanted: Wanted) -> Store:
    return Store(wanted.settings.home)


def access_of(wanted: Wanted) -> Access:
    return Access(offline=wanted.settings.offline, hf_token=wanted.settings.hf_token)


def _written_folder(wanted: Wanted, embedder: Embedder) -> Path:
    """Where the tokenizer of an entry of Shoal's is: with the model in the store, else fetched without the weights."""
    address = parse_address(embedder.parameters.get("shoal_source", ""))
    stored = store_of(wanted).find(address)
    if stored is not None:
        return stored.path
    try:
        return tokenizer_folder(address, store=store_of(wanted), access=access_of(wanted))
    except ModelFileError as error:
        # Of static models and of some heads the tokenizer cannot be told without reading them as a whole.
        logger.info("%s: the files of %s are read as a whole (%s)", wanted.name, address, error.message)
        return prepare_local(address, wanted.settings).path


def _foreign(wanted: Wanted, embedder: Embedder, source: str) -> Specified:
    table = wanted.table
    folder = tokenizer_folder(source, store=store_of(wanted), access=access_of(wanted))
    head = None if table.labels and table.activation else head_of(folder / SOURCE)
    scores = gives_scores(embedder, head)
    outputs = [port.canonical for port in embedder.outputs]
    dense = [name for name in outputs if name != SPARSE]
    found = foreign_spec(
        source,
        store=store_of(wanted),
        inputs=[port.canonical for port in embedder.inputs],
        outputs=[SENTENCE] if scores or not dense else dense,
        dimension=0 if scores or not dense else embedder.dimension or 0,
        overrides=Overrides(
            pooling=table.pooling,
            max_tokens=table.max_tokens,
            prompts=table.prompts or None,
            default_prompt_name=table.default_prompt_name,
        ),
        access=access_of(wanted),
    )
    for note in found.notes:
        logger.warning("%s: %s", wanted.name, note)
    changes: dict[str, Any] = {}
    if scores:
        score = score_spec(wanted.name, table, embedder, head, embedder.dimension)
        changes = {"dimension": 0, "modules": (), "score": score}
    if SPARSE in outputs:
        changes |= {"sparse": SparseSpec(output=SPARSE)} | ({} if dense else {"dimension": 0})
    if TOKENS in outputs and embedder.level == "sentence" and not scores:
        changes["tokens"] = TOKENS
    return Specified(folder, msgspec.structs.replace(found.spec, **changes), head=head)

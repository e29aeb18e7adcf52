"""Tokenizers and settings of text models that run elsewhere and were not made by Shoal, without their weights.

Files under the store's home:

    tokenizers/<source>/<revision>/tokenizer.json   the tokenizer, with the settings of a chat beside it
    tokenizers/<source>/<revision>/source/...       the files that they and the TextSpec are made from
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import msgspec

from shoal.decoding import json_decoder
from shoal.errors import AddressError, ConfigError, ModelFileError
from shoal.models.address import LOCAL_SCHEMES, Address, parse_source
from shoal.models.convert.contract import Contract, Normalize, Pooling, read_contract
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.spec import SENTENCE, text_spec
from shoal.models.convert.contract.types import PoolingMode
from shoal.models.generative import copy_settings, is_causal
from shoal.models.prepare import SOURCE
from shoal.models.sources import Access, fetch
from shoal.models.sources.access import disk_error
from shoal.models.sources.folder import resolve
from shoal.models.sources.select import choose_in_folder
from shoal.models.store import Store
from shoal.models.tokenizer_file import TOKENIZER, write_tokenizer
from shoal.specs import TextSpec

_SPEC = json_decoder(TextSpec)

POOLED, TOKENS = "pooled", "token_embeddings"
DEFAULT_POOLING = "mean"
DEFAULT_MAX_TOKENS = 512
_MODES: tuple[str, ...] = get_args(PoolingMode)
_FOLDER = "tokenizers"
_PADS = ("[PAD]", "<pad>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """The operator's settings for a model; None: as its files say. `pooling`: one mode, or several joined by "+"."""

    pooling: str | None = None
    max_tokens: int | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt_name: str | None = None
    normalize: bool | None = None


class ForeignModel(NamedTuple):
    """A model that runs elsewhere. `folder` holds the spec's tokenizer. `notes`: assumptions worth showing, one per
    line."""

    folder: Path
    spec: TextSpec
    notes: tuple[str, ...]


def foreign_spec(
    source: Address | str,
    *,
    store: Store,
    inputs: Sequence[str],
    outputs: Sequence[str],
    dimension: int = 0,
    overrides: Overrides | None = None,
    access: Access | None = None,
) -> ForeignModel:
    """Return the TextSpec of a model that runs elsewhere, with its tokenizer from `source`: an address or a folder.

    `inputs` and `outputs` are those of the served graph by their canonical names; the first output is the one to use.
    Shoal pools token vectors. `dimension` is that of its results, 0 if unknown. Files are fetched once and kept; later
    calls need no network. Blocks.

    Raises SourceError if the files cannot be fetched, ModelFileError if they describe something that cannot be served,
    and ConfigError for an override that cannot work.
    """
    overrides = overrides or Overrides()
    folder = tokenizer_folder(source, store=store, access=access)
    contract = read_contract(folder / SOURCE, elsewhere=True)
    pooled = _choose_output(outputs)
    _check(contract, inputs, pooled)
    notes: list[str] = []
    contract = _apply_overrides(contract, overrides, pooled)
    if pooled == TOKENS and not overrides.pooling and not (folder / SOURCE / "modules.json").is_file():
        notes.append(f"no modules.json defines the pooling of token vectors: using {DEFAULT_POOLING}; set `pooling`")
    if not contract.max_tokens:
        contract = msgspec.structs.replace(contract, max_tokens=DEFAULT_MAX_TOKENS)
        notes.append(
            f"no file defines the maximum length of a text: using {DEFAULT_MAX_TOKENS} tokens; set `max_tokens`"
        )
    spec = text_spec(_with_pad(folder, contract), tokenizer=TOKENIZER, inputs=inputs, pooled=pooled)
    return ForeignModel(folder, _with_prompts(_set_dimension(spec, dimension, str(source)), overrides), tuple(notes))


def tokenizer_folder(source: Address | str, *, store: Store, access: Access | None = None) -> Path:
    """Return a folder with the final tokenizer.json, other settings that a chat needs (`generative.SETTINGS`), and in
    `source/` the original files. Blocks.

    Files that were fetched or pulled before need no network. Raises SourceError and ModelFileError.
    """
    address = resolve(parsed, weights=False) if (parsed := _parse(source)).scheme == "file" else parsed
    home = store.home / _FOLDER / _folder_name(address)
    target = home / (address.revision.replace("/", "+") or "newest")
    if (target / TOKENIZER).is_file():
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=home, ignore_cleanup_errors=True) as temporary:
            partial = Path(temporary) / "entry"
            pulled = store.find(address)
            if pulled is not None and (pulled.path / SOURCE).is_dir():
                _copy_settings(pulled.path / SOURCE, partial / SOURCE)
            else:
                fetched = fetch(address, partial / SOURCE, access=access, weights=False)
                if fetched.folder != partial / SOURCE:
                    _copy_settings(fetched.folder, partial / SOURCE)
            _assemble(partial)
            _replace(partial, target)
        if address.scheme == "file":  # its revision is a fingerprint, so older entries are useless
            for other in home.iterdir():
                if other != target and not other.name.startswith("."):
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, str(address)) from error
    return target


def spec_from_parameters(text: str) -> TextSpec:
    """Return the TextSpec that Shoal's repository writer left in a model's configuration (`shoal_text`).

    Raises ModelFileError if it is not readable, as after an edit by hand or by another version of Shoal.
    """
    try:
        return _SPEC.decode(text)
    except msgspec.MsgspecError as error:
        raise ModelFileError(
            f"is not readable ({error}); load the model with Shoal again", file="config.pbtxt", key="shoal_text"
        ) from None


def _assemble(entry: Path) -> None:
    """Write the final tokenizer and, beside it, the settings of a chat. Raises ModelFileError."""
    source = entry / SOURCE
    if not (is_causal(source) and (source / TOKENIZER).is_file()):
        write_tokenizer(source, read_contract(source, elsewhere=True), entry / TOKENIZER)
    copy_settings(source, entry)


def _parse(source: Address | str) -> Address:
    if isinstance(source, Address):
        return source
    scheme, _, rest = source.partition(":")
    if rest.startswith("//") and scheme not in LOCAL_SCHEMES:
        raise AddressError(f"{source} is a model on another server: there are no files to download; serve it instead")
    return parse_source(f"file:{source}" if source.startswith(("/", ".", "~")) else source)


def _folder_name(address: Address) -> str:
    """Return a readable folder name that is unique to the source."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "+", address.id)[:64]
    digest = hashlib.sha256(f"{address.scheme}:{address.target}".encode()).hexdigest()[:16]
    return f"{readable}+{digest}"


def _copy_settings(folder: Path, target: Path) -> None:
    """Copy the settings of a folder that is used in place, so that the entry is complete."""
    for name in choose_in_folder(folder, weights=False):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def _replace(partial: Path, target: Path) -> None:
    """Move a finished entry into place, unless another process was faster: its entry is equivalent."""
    try:
        partial.rename(target)
    except OSError:
        if not (target / TOKENIZER).is_file():
            raise


def _choose_output(outputs: Sequence[str]) -> str:
    """Choose the graph output to read: the one before a final Normalize if there are both."""
    if outputs[0] == TOKENS:
        return TOKENS
    return POOLED if {POOLED, SENTENCE} <= set(outputs) else SENTENCE


def _check(contract: Contract, inputs: Sequence[str], pooled: str) -> None:
    """Reject models whose vectors would differ from the original model's."""
    weighted = [module for module in contract.modules if not isinstance(module, Normalize)]
    if pooled == TOKENS and weighted:
        raise ModelFileError(
            f"a {type(weighted[0]).__name__} follows the pooling, but the served graph ends in token vectors: serve "
            "one that returns sentence_embedding",
            file="modules.json",
        )
    if "position_ids" in inputs and contract.encoder is not None and contract.encoder.position_offset:
        raise ModelFileError(
            f"positions of this family start at {contract.encoder.position_offset}, not at 0: export the graph "
            "without its position_ids input",
            file=contract.file("config.json"),
            key="model_type",
        )


def _apply_overrides(contract: Contract, overrides: Overrides, pooled: str) -> Contract:
    changes: dict[str, Any] = {}
    if overrides.pooling:
        modes = _modes(overrides.pooling)
        changes["pooling"] = Pooling(modes=modes, include_prompt=contract.pooling.include_prompt)
        if pooled == TOKENS:
            changes["dimension"] = contract.dimension // len(contract.pooling.modes) * len(modes)
    if overrides.max_tokens is not None:
        changes["max_tokens"] = overrides.max_tokens
    if overrides.normalize is not None:
        kept = contract.modules[:-1] if contract.ends_normalized else contract.modules
        changes["modules"] = (*kept, Normalize()) if overrides.normalize else kept
    return msgspec.structs.replace(contract, **changes)


def _modes(pooling: str) -> tuple[PoolingMode, ...]:
    modes = pooling.split("+")
    if unknown := [mode for mode in modes if mode not in _MODES]:
        raise ConfigError(f"`pooling` {unknown[0]!r} is not known; use {', '.join(_MODES)}, or several joined by '+'")
    return tuple(cast(PoolingMode, mode) for mode in modes)


def _with_pad(folder: Path, contract: Contract) -> Contract:
    """Take the padding id from the tokenizer if no config.json states it: a graph may recognize padding only by its
    id."""
    config = read_object(folder / SOURCE, contract.file("config.json"))
    if contract.encoder is not None or (config is not None and "pad_token_id" in config):
        return contract
    stated = read_object(folder / SOURCE, contract.file("tokenizer_config.json"))
    named = stated.data.get("pad_token") if stated else None
    names = (named.get("content") if isinstance(named, dict) else named, *_PADS)
    added = (read_object(folder, TOKENIZER) or JsonFile(TOKENIZER, {})).data.get("added_tokens") or []
    ids = {token["content"]: token["id"] for token in added}
    found = next((ids[name] for name in names if name in ids), contract.pad_id)
    return msgspec.structs.replace(contract, pad_id=found)


def _set_dimension(spec: TextSpec, dimension: int, source: str) -> TextSpec:
    """Set the dimension of the served vectors, which must match the one in the files."""
    if not dimension:
        return spec
    if spec.pooled == TOKENS:
        dimension *= len(spec.pooling.split("+"))
    if spec.dimension not in (0, dimension):
        raise ConfigError(
            f"the tokenizer's source {source} belongs to a model with {spec.dimension} dimensions, but the served "
            f"model returns {dimension}: set `tokenizer` to the model that it was made from"
        )
    return msgspec.structs.replace(spec, dimension=dimension)


def _with_prompts(spec: TextSpec, overrides: Overrides) -> TextSpec:
    """Replace the model's prompts by the given ones."""
    prompts = dict(overrides.prompts) if overrides.prompts else spec.prompts
    default = overrides.default_prompt_name
    if default is not None and default not in prompts:
        known = ", ".join(prompts) or "no prompt"
        raise ConfigError(f"`default_prompt_name` {default!r} is not among the model's prompts: it has {known}")
    if default is None and spec.default_prompt_name in prompts:
        default = spec.default_prompt_name
    return msgspec.structs.replace(spec, prompts=prompts, default_prompt_name=default)

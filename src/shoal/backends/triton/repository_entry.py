"""Builds what Shoal writes into a Triton model repository for one served model: pure, from a specification to files.

The files are one Triton model, or three if Triton takes texts: an encoder, a tokenizer and an ensemble of both that
takes BYTES. A model of texts and images has two: its text tower under its own name, and its image tower beside it.
Parameters of each config.pbtxt record its origin, so that any Shoal that finds the model on a server can identify it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from google.protobuf.json_format import ParseDict
from google.protobuf.text_format import MessageToString

from shoal.backends.triton.naming import Part, check_served_name, triton_name
from shoal.errors import ConfigError, ModelFileError
from shoal.kserve.protocol_pb2 import ModelConfig
from shoal.specs import ContrastSpec, ImageSpec, TextSpec

FORMAT = 1
"""Version of the parameters in config.pbtxt and of the mark; raised when an older Shoal could not read them."""

Platform: TypeAlias = Literal["onnxruntime", "openvino", "tensorrt", "python"]
Kind: TypeAlias = Literal["auto", "cpu", "gpu"]
Accelerator: TypeAlias = Literal["none", "tensorrt", "openvino"]
Content: TypeAlias = bytes | Path

_RUNS_ON: dict[Accelerator, Kind] = {"tensorrt": "gpu", "openvino": "cpu"}

PROGRAMS = Path(__file__).with_name("programs")
WARM_UP_TOKENS = 16
MAX_PIXEL_BYTES = 32 * 2**20
"""Maximum per call. Triton's python backend passes tensors through /dev/shm, of which a container gets 64 MB."""

TEXT, EMBEDDING = "text", "embedding"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor by its name in the graph; `datatype` as in config.pbtxt without TYPE_, `dims` without the batch axis."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions:
    """How Triton runs a model. `max_queue_size` 0: no limit. Raises ConfigError for invalid values or combinations."""

    platform: Platform = "onnxruntime"
    max_batch_size: int = 64
    instances: int = 1
    kind: Kind = "auto"
    fp16: bool = False
    accelerator: Accelerator = "none"
    dynamic_batching: bool = True
    max_queue_size: int = 0
    warm_up: bool = True
    text_in: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_batch_size", 1), ("instances", 1), ("max_queue_size", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}", param=name)
        if self.max_queue_size and not self.dynamic_batching:
            raise ConfigError(
                "Triton limits only the queue of its dynamic batcher: enable triton_dynamic_batching, or leave out "
                "triton_queue_size",
                param="triton_queue_size",
            )
        if self.accelerator != "none" and self.platform != "onnxruntime":
            raise ConfigError(
                f"only Triton's onnxruntime backend has accelerators: choose triton_platform onnxruntime, or "
                f"triton_accelerator none with {self.platform}",
                param="triton_accelerator",
            )
        needed = _RUNS_ON.get(self.accelerator)
        if needed and self.kind not in (needed, "auto"):
            raise ConfigError(
                f"the {self.accelerator} accelerator runs on the {needed}: choose triton_kind {needed}, or another "
                "triton_accelerator",
                param="triton_accelerator",
            )
        if self.platform == "tensorrt" and self.kind == "cpu":
            raise ConfigError(
                "TensorRT plans run on GPUs: choose triton_kind gpu, or another triton_platform", param="triton_kind"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTower:
    """The ONNX file that reads images, their preprocessing, and its external weights, under the graph's folder."""

    graph: Path
    spec: ImageSpec
    data: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySpec:
    """One model to write. Raises ConfigError, InvalidValue (`name`) and ModelFileError for an invalid one.

    `graph`: the ONNX file, or the plan for `tensorrt`; `data`: its external weights, files under the graph's folder.
    These are of the tower that reads `text`. `image`: the tower that reads images, beside that one, or alone if
    `text` is None: then `graph` is its graph too. `contrast`: how images and texts are compared. `inputs` and
    `outputs`: the graph's; empty stands for int64 inputs and float32 outputs as `text` names them. `token_width`: of
    its token vectors, if it has any; -1 for a graph that leaves it open. `tokenizer`: the tokenizer.json, for
    `text_in`. `source`: the model's address. `space`: Shoal's hash of what its vectors mean. `precision`: the graph's
    own ("f32", "f16", ...). `tokenizer_fingerprint`: of the tokenizer that makes its ids.
    """

    name: str
    graph: Path
    text: TextSpec | None
    image: ImageTower | None = None
    contrast: ContrastSpec | None = None
    data: tuple[Path, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    token_width: int = -1
    tokenizer: Path | None = None
    source: str = ""
    space: str = ""
    precision: str = "f32"
    tokenizer_fingerprint: str = ""
    options: EntryOptions = field(default_factory=EntryOptions)

    def __post_init__(self) -> None:
        check_served_name(self.name)
        options = self.options
        if self.text is None and self.image is None:
            raise ConfigError(f"{self.name} reads neither texts nor images: there is nothing to write")
        if options.fp16 and self.precision != "f16" and (options.accelerator, options.kind) != ("tensorrt", "gpu"):
            raise ConfigError(
                "triton_fp16 needs the TensorRT accelerator on a GPU: choose triton_accelerator tensorrt and "
                f"triton_kind gpu, or use a graph that is already fp16 (this one is {self.precision})",
                param="triton_fp16",
            )
        if options.text_in and (why := self._why_no_text_in()):
            raise ConfigError(
                f"an ensemble that accepts texts returns the dense vectors of an encoder, but {self.name} {why}: load "
                "it without text_in, and let Shoal tokenize",
                param="triton_text_in",
            )
        if options.text_in and self.tokenizer is None:
            raise ModelFileError(
                "is required for text_in: load without text_in, or add a tokenizer", file="tokenizer.json"
            )
        for tower in (self, self.image) if self.image is not None else (self,):
            folder = tower.graph.parent
            for path in tower.data:
                if not path.is_relative_to(folder) or ".." in path.relative_to(folder).parts:
                    raise ModelFileError("is outside the graph's folder", file=str(path))

    def _why_no_text_in(self) -> str:
        """Return why no ensemble that takes texts can be made of it; "" if one can."""
        if self.image is not None:
            return "reads images"
        assert self.text is not None, "text or image is set"
        if not self.text.dimension:
            return "returns no dense vectors"
        return "" if self.text.frame_tokens else "frames texts in a way that the tokenizer on Triton does not support"

    @property
    def tensors(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Inputs and outputs of the text tower."""
        assert self.text is not None, "only called for models that read text"
        dims_by_name = output_dims(self.text, self.token_width)
        return (
            self.inputs or tuple(Tensor(name, "INT64", (-1,)) for name in self.text.inputs),
            self.outputs or tuple(Tensor(name, "FP32", dims) for name, dims in dims_by_name.items()),
        )


def output_dims(text: TextSpec, token_width: int) -> dict[str, tuple[int, ...]]:
    """Return the dims of a graph's outputs for one text, by output name; -1: one per token, or unknown."""
    heads: dict[str, tuple[int, ...]] = {text.tokens: (-1, token_width)}
    if text.score is not None:
        heads[text.score.output] = (len(text.score.labels),)
    if text.sparse is not None:
        heads[text.sparse.output] = (text.vocab_size or -1,) if text.sparse.per == "vocabulary" else (-1,)
    if text.multi is not None:
        heads[text.multi.output] = (-1, text.multi.dimension)
    return {name: heads.get(name, (text.dimension,)) for name in text.outputs}


def max_images_per_call(spec: ImageSpec) -> int:
    """Return the maximum number of images per call to an image tower."""
    height, width = spec.size
    return max(1, MAX_PIXEL_BYTES // (3 * height * width * 4))


def image_tensors(spec: ImageSpec) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the inputs and outputs of an image tower."""
    width = len(spec.score.labels) if spec.score is not None else spec.dimension
    return (Tensor(spec.input, "FP32", (3, *spec.size)),), (Tensor(spec.output, "FP32", (width,)),)


@dataclass(frozen=True, slots=True)
class TritonModel:
    """One folder of a repository: its name, its part of the entry, its configuration, and all other files by their path
    in the folder."""

    name: str
    part: Part
    config: ModelConfig
    files: dict[str, Content]

    @property
    def config_text(self) -> bytes:
        """config.pbtxt: protobuf's text format, in ASCII."""
        return MessageToString(self.config, as_utf8=False).encode("ascii")


def triton_models(spec: EntrySpec) -> tuple[TritonModel, ...]:
    """Return the models of an entry in the order to create them: parts before the whole."""
    if spec.options.text_in:
        return (_encoder_model(spec, "encoder"), _tokenizer_model(spec), _ensemble_model(spec))
    if spec.text is None:
        return (_image_model(spec, "model"),)
    return (
        (_encoder_model(spec, "model"),)
        if spec.image is None
        else (_image_model(spec, "image"), _encoder_model(spec, "model"))
    )


def _encoder_model(spec: EntrySpec, part: Part) -> TritonModel:
    config, files = _tower_config(spec, part, spec.graph, spec.data, spec.tensors)
    if spec.options.warm_up:
        assert spec.text is not None, "only models that read text have an encoder"
        config["modelWarmup"], warm_up = _warm_up(spec.tensors[0], spec.text.max_tokens)
        files |= warm_up
    return _build_model(spec, part, config, files)


def _image_model(spec: EntrySpec, part: Part) -> TritonModel:
    """Build an image tower. A single image warms it up: all images have the same shape."""
    tower = spec.image
    assert tower is not None, "only called for entries with an image tower"
    tensors = image_tensors(tower.spec)
    config, files = _tower_config(spec, part, tower.graph, tower.data, tensors)
    config["maxBatchSize"] = min(spec.options.max_batch_size, max_images_per_call(tower.spec))
    if spec.options.warm_up:
        (pixels,) = tensors[0]
        blank = {"dataType": f"TYPE_{pixels.datatype}", "dims": list(pixels.dims), "zeroData": True}
        config["modelWarmup"] = [{"name": "an image", "batchSize": 1, "inputs": {pixels.name: blank}}]
    return _build_model(spec, part, config, files)


def _tower_config(
    spec: EntrySpec,
    part: Part,
    graph: Path,
    data: Sequence[Path],
    tensors: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
) -> tuple[dict[str, Any], dict[str, Content]]:
    """Return the configuration and the files of a model that runs a graph."""
    options = spec.options
    inputs, outputs = tensors
    config = _base_config(spec, part) | {
        "backend": options.platform,
        "defaultModelFilename": _MAIN_FILES[options.platform],
        "input": [_port_config(tensor) for tensor in inputs],
        "output": [_port_config(tensor) for tensor in outputs],
        "instanceGroup": [{"count": options.instances, "kind": f"KIND_{options.kind.upper()}"}],
    }
    if accelerators := _accelerators(options):
        config["optimization"] = {"executionAccelerators": accelerators}
    files: dict[str, Content] = {f"1/{_GRAPH.get(options.platform, 'model.onnx')}": graph}
    for path in data:
        files[f"1/{path.relative_to(graph.parent).as_posix()}"] = path
    if options.platform == "python":
        files["1/model.py"] = PROGRAMS / "encoder.py"
    return config, files


def _tokenizer_model(spec: EntrySpec) -> TritonModel:
    inputs, _ = spec.tensors
    config = _base_config(spec, "tokenizer") | {
        "backend": "python",
        "input": [_port_config(Tensor(TEXT, "STRING", (1,)))],
        "output": [_port_config(Tensor(tensor.name, "INT64", tensor.dims)) for tensor in inputs],
        "instanceGroup": [{"count": 1, "kind": "KIND_CPU"}],
    }
    assert spec.tokenizer is not None, "EntrySpec rejects text_in without a tokenizer"
    files: dict[str, Content] = {"1/model.py": PROGRAMS / "tokenizer.py", "1/tokenizer.json": spec.tokenizer}
    return _build_model(spec, "tokenizer", config, files)


def _ensemble_model(spec: EntrySpec) -> TritonModel:
    inputs, outputs = spec.tensors
    assert spec.text is not None, "EntrySpec rejects text_in for other models"
    main = spec.text.sentence_embedding
    same = {tensor.name: tensor.name for tensor in inputs}
    config = _base_config(spec, "model") | {
        "platform": "ensemble",
        "input": [_port_config(Tensor(TEXT, "STRING", (1,)))],
        "output": [_port_config(Tensor(EMBEDDING, one.datatype, one.dims)) for one in outputs if one.name == main],
        "ensembleScheduling": {
            "step": [
                _step(spec, "tokenizer", {TEXT: TEXT}, same),
                _step(spec, "encoder", same, {main: EMBEDDING}),
            ]
        },
    }
    config.pop("dynamicBatching", None)  # the parts have their own; Triton rejects it here
    # A version is a folder, and archives and version control drop empty folders.
    return _build_model(
        spec, "model", config, {"1/ensemble": b"The models of this ensemble are named in config.pbtxt.\n"}
    )


def _step(spec: EntrySpec, part: Part, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> dict[str, Any]:
    return {"modelName": triton_name(spec.name, part), "modelVersion": -1, "inputMap": inputs, "outputMap": outputs}


def _base_config(spec: EntrySpec, part: Part) -> dict[str, Any]:
    parameters = {
        "shoal_format": str(FORMAT),
        "shoal_name": spec.name,
        "shoal_part": part,
        "shoal_source": spec.source,
        "shoal_space": spec.space,
        "shoal_precision": spec.precision,
        "shoal_tokenizer": spec.tokenizer_fingerprint,
        "shoal_kind": spec.options.kind,
    }
    # An image tower has no `shoal_text`, which distinguishes it from the tower under the model's own name.
    of: dict[str, msgspec.Struct | None] = {
        "shoal_text": spec.text if part != "image" else None,
        "shoal_image": spec.image.spec if spec.image is not None else None,
        "shoal_contrast": spec.contrast,
    }
    parameters |= {key: msgspec.json.encode(value).decode() for key, value in of.items() if value is not None}
    config: dict[str, Any] = {
        "name": triton_name(spec.name, part),
        "maxBatchSize": spec.options.max_batch_size,
        "parameters": {key: {"stringValue": value} for key, value in parameters.items()},
    }
    if spec.options.dynamic_batching:
        limit = spec.options.max_queue_size
        config["dynamicBatching"] = {"defaultQueuePolicy": {"maxQueueSize": limit}} if limit else {}
    return config


def read_parameters(config: ModelConfig) -> dict[str, str]:
    """Return the parameters that identify an entry of Shoal's; none for any other model."""
    return {key: value.string_value for key, value in config.parameters.items() if key.startswith("shoal_")}


def _port_config(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "dataType": f"TYPE_{tensor.datatype}", "dims": list(tensor.dims)}


def _accelerators(options: EntryOptions) -> dict[str, Any]:
    if options.accelerator == "tensorrt":
        mode = {"parameters": {"precision_mode": "FP16"}} if options.fp16 else {}
        return {"gpuExecutionAccelerator": [{"name": "tensorrt"} | mode]}
    if options.accelerator == "openvino":
        return {"cpuExecutionAccelerator": [{"name": "openvino"}]}
    return {}


def _warm_up(inputs: tuple[Tensor, ...], max_tokens: int) -> tuple[list[dict[str, Any]], dict[str, Content]]:
    """Return samples of a short and the longest text, to run before Triton reports the model ready, and their files.

    The masks attend to every token: with none attended some graphs divide by zero.
    """
    samples = []
    files: dict[str, Content] = {}
    for length in sorted({min(WARM_UP_TOKENS, max_tokens), max_tokens}):
        sample_inputs: dict[str, dict[str, Any]] = {}
        for tensor in inputs:
            sample_inputs[tensor.name] = {"dataType": f"TYPE_{tensor.datatype}", "dims": [length]}
            if tensor.name.endswith("_mask") and tensor.datatype in _WIDTH:
                ones = f"ones-{tensor.datatype.lower()}-{length}"
                sample_inputs[tensor.name]["inputDataFile"] = ones
                files[f"warmup/{ones}"] = (1).to_bytes(_WIDTH[tensor.datatype], "little") * length
            else:
                sample_inputs[tensor.name]["zeroData"] = True
        samples.append({"name": f"{length} tokens", "batchSize": 1, "inputs": sample_inputs})
    return samples, files


def _build_model(spec: EntrySpec, part: Part, config: dict[str, Any], files: dict[str, Content]) -> TritonModel:
    return TritonModel(triton_name(spec.name, part), part, ParseDict(config, ModelConfig()), files)


_GRAPH: dict[Platform, str] = {"tensorrt": "model.plan"}
_MAIN_FILES: dict[Platform, str] = {
    "onnxruntime": "model.onnx",
    "openvino": "model.onnx",
    "tensorrt": "model.plan",
    "python": "model.py",
}
"""The file that each backend opens."""

_WIDTH = {"INT64": 8, "INT32": 4, "BOOL": 1}
"""Bytes per value of the datatypes that masks have."""

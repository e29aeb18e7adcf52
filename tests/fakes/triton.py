"""A Triton in this process: a grpc.aio server on the real service's path, with the quirks of the real one.

    async with FakeTriton() as triton:
        triton.add(FakeModel("emb", config=embedder("emb"), answer=lambda request: reply(request, vectors=array)))
        client = Client(triton.target)

By default it behaves as observed of server 2.51; the switches of FakeTriton make it another KServe v2 server. `calls`
counts RPCs by name, `requests` records them in order, `cancelled` counts requests whose caller disconnected.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from shoal.backends.triton.response import read_outputs
from shoal.kserve import EMPTY_FINAL, FINAL, SERVICE, codec
from shoal.kserve import protocol_pb2 as pb
from shoal.types import Array
from tests.fakes import triton_codec

Code = grpc.StatusCode
Answer = Callable[[pb.ModelInferRequest], Any]
"""What a model does with a request: a ModelInferResponse, an awaitable of one, or (decoupled) an async iterator of
them. It raises Refused for an error of the model."""

DATATYPES = {pb.TYPE_STRING: "BYTES"}


class Refused(Exception):
    """An error that the server raises. `accepted`: the model had started, so a stream marks the error as final."""

    def __init__(self, message: str, code: grpc.StatusCode = Code.INTERNAL, *, accepted: bool = True) -> None:
        super().__init__(message)
        self.message, self.code, self.accepted = message, code, accepted


def empty(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    return pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)


@dataclass
class FakeModel:
    """`loaded` is its state at start; `pushed` marks a model from a file push. `load_error`: why a load fails, as the
    index reports it. `loading`: a load answers before it is done, and the test sets the state. `broken`: its process
    has died; it is READY, and fails until it is loaded again. `unloading`: number of index requests until an unload is
    done. `platform` is reported in its metadata.
    """

    name: str
    config: pb.ModelConfig = field(default_factory=pb.ModelConfig)
    answer: Answer = empty
    loaded: bool = True
    version: str = "1"
    platform: str = ""
    load_error: str = ""
    loading: bool = False
    broken: bool = False
    unloading: int = 2
    pushed: bool = False
    state: str = ""
    reason: str = ""
    statistics: pb.ModelStatistics | None = None

    def __post_init__(self) -> None:
        self.config.name = self.config.name or self.name
        if self.loaded:
            self.state = "READY"

    @property
    def decoupled(self) -> bool:
        return self.config.model_transaction_policy.decoupled


def embedder(name: str, *, dimension: int = 4, max_batch_size: int = 32) -> pb.ModelConfig:
    """Return the configuration of a model from one BYTES input `text` to one FP32 output `vectors`."""
    config = pb.ModelConfig(name=name, backend="python", max_batch_size=max_batch_size)
    config.input.add(name="text", data_type=pb.TYPE_STRING, dims=[1])
    config.output.add(name="vectors", data_type=pb.TYPE_FP32, dims=[dimension])
    return config


def reply(request: pb.ModelInferRequest, *, final: bool | None = None, **outputs: Array) -> pb.ModelInferResponse:
    """Return an answer with these raw arrays: object arrays as BYTES, others with their own type. `final`: Triton's
    mark."""
    response = empty(request)
    kinds = {dtype: name for name, dtype in codec.DTYPES.items()}
    for name, array in outputs.items():
        triton_codec.add_output(response, name, kinds.get(array.dtype, "BYTES"), array)
    if final is not None:
        response.parameters[FINAL].bool_param = final
    return response


@dataclass
class FakeTriton:
    """`mode`: "explicit", "poll" or "none". `empty_final` False: it ignores requests for empty final answers.
    `unwrapped`: it streams plain answers, like MLServer. `typed`: it answers typed contents, like Dynamo.
    `repository_first`: it reads a model's name from field 1 of load and unload, like KServe. `key`: metadata that it
    expects, for a restricted API. `after_error`: a stream stays open after an error until this is set.
    """

    mode: str = "explicit"
    empty_final: bool = True
    unwrapped: bool = False
    typed: bool = False
    repository_first: bool = False
    key: tuple[str, str] | None = None
    credentials: grpc.ServerCredentials | None = None
    live: bool = True
    ready: bool = True
    models: dict[str, FakeModel] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, Message]] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: int = 0
    port: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    after_error: asyncio.Event | None = None
    _server: grpc.aio.Server | None = None
    _called: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def target(self) -> str:
        return f"localhost:{self.port}"

    def add(self, model: FakeModel) -> FakeModel:
        self.models[model.name] = model
        return model

    async def start(self) -> None:
        """Listen: on a free port the first time, on the same one after `stop`."""
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((_Calls(self),))
        address = f"127.0.0.1:{self.port}"
        if self.credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, self.credentials)
        await server.start()
        self._server = server

    async def stop(self, grace: float | None = None) -> None:
        """Break running calls and close; pushed models are lost, as with the real server."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace)
        self.models = {name: model for name, model in self.models.items() if not model.pushed}

    async def wait_for_calls(self, name: str, times: int = 1) -> None:
        """Wait until an RPC was called that many times in total."""
        async with self._called:
            await self._called.wait_for(lambda: self.calls[name] >= times)

    async def note(self, name: str, request: Message, metadata: dict[str, str]) -> None:
        self.requests.append((name, request))
        self.metadata.append(metadata)
        async with self._called:
            self.calls[name] += 1
            self._called.notify_all()

    async def call(self, name: str, request: Any) -> Message:
        """Return the answer of a unary call. Raises Refused."""
        answers: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: pb.ServerLiveResponse(live=self.live),
            "ServerReady": lambda _: pb.ServerReadyResponse(ready=self.ready),
            "ServerMetadata": lambda _: pb.ServerMetadataResponse(name="triton", version="2.51.0"),
            "ModelReady": self._ready,
            "ModelMetadata": lambda message: self._metadata(self._find_model(message.name)),
            "ModelConfig": lambda message: pb.ModelConfigResponse(config=self._find_model(message.name).config),
            "ModelStatistics": self._statistics,
            "ModelInfer": self._infer,
            "RepositoryIndex": lambda _: self._index(),
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        answer = answers[name](request)
        if inspect.isawaitable(answer):
            answer = await answer
        assert isinstance(answer, Message), answer
        return answer

    def _ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        model = self.models.get(request.name)  # an unknown model is not an error
        return pb.ModelReadyResponse(ready=model is not None and model.state == "READY")

    async def _infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        model = self._find_model(request.model_name)
        if model.decoupled:
            raise Refused("ModelInfer RPC doesn't support models with decoupled transaction policy", Code.UNIMPLEMENTED)
        self._check(model, request)
        return self._finish_response(await _single(model.answer(request)))

    async def stream(self, request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Yield the answers to one request of a stream."""
        try:
            model = self._find_model(request.model_name)
            self._check(model, request)
            wants_empty = self.empty_final and triton_codec.get_parameter(request.parameters, EMPTY_FINAL) is True
            final: object = None
            async for response in _responses(model.answer(request)):
                final = triton_codec.get_parameter(response.parameters, FINAL)
                yield pb.ModelStreamInferResponse(infer_response=self._finish_response(response))
            if wants_empty and final is not True:
                yield pb.ModelStreamInferResponse(infer_response=reply(request, final=True))
        except Refused as error:
            last = pb.ModelStreamInferResponse(error_message=error.message)
            last.infer_response.id = request.id
            if error.accepted:  # errors of the server itself have no final flag
                last.infer_response.parameters[FINAL].bool_param = True
            yield last
            if self.after_error is not None:
                await self.after_error.wait()

    def _find_model(self, name: str) -> FakeModel:
        model = self.models.get(name)
        if model is None:
            raise Refused(f"Request for unknown model: '{name}' is not found", Code.NOT_FOUND, accepted=False)
        if model.state != "READY":
            message = f"Request for unknown model: '{name}' has no available versions"
            raise Refused(message, Code.NOT_FOUND, accepted=False)
        return model

    def _check(self, model: FakeModel, request: pb.ModelInferRequest) -> None:
        if model.broken:
            raise Refused(f"Stub process '{model.name}_0' is not healthy.")

        def refuse(message: str) -> NoReturn:
            prefix = f"[request id: {request.id}] " if request.id else ""
            raise Refused(prefix + message, Code.INVALID_ARGUMENT, accepted=False)

        for name in request.parameters:
            if name.startswith("triton_") and name != EMPTY_FINAL:
                refuse(f"parameter keys starting with 'triton_' are reserved for Triton usage, not '{name}'")
        typed = [tensor for tensor in request.inputs if tensor.HasField("contents")]
        if typed and request.raw_input_contents:
            refuse("contents field must not be specified when using raw_input_contents")
        known = {port.name: port for port in model.config.input}
        for tensor in request.inputs if known else ():
            if tensor.name not in known:
                refuse(f"unexpected inference input '{tensor.name}' for model '{model.name}'")
            port = known[tensor.name]
            expected = DATATYPES.get(port.data_type) or pb.DataType.Name(port.data_type).removeprefix("TYPE_")
            if tensor.datatype != expected:
                refuse(
                    f"inference input data-type is '{tensor.datatype}', model expects '{expected}' for '{model.name}'"
                )
            batched = model.config.max_batch_size > 0
            dims = list(tensor.shape)[1 if batched else 0 :]
            if len(dims) != len(port.dims) or any(a not in (-1, b) for a, b in zip(port.dims, dims, strict=True)):
                refuse(
                    f"unexpected shape for input '{tensor.name}' for model '{model.name}'. Expected {list(port.dims)}"
                )
            if batched and tensor.shape[0] > model.config.max_batch_size:
                limit = model.config.max_batch_size
                refuse(f"inference request batch-size must be <= {limit} for '{model.name}'")
        missing = {name for name, port in known.items() if not port.optional} - {each.name for each in request.inputs}
        if missing:
            refuse(f"expected {len(known)} inputs but got {len(request.inputs)} inputs for model '{model.name}'")

    def _finish_response(self, response: pb.ModelInferResponse) -> pb.ModelInferResponse:
        if not self.typed:
            return response
        answer = pb.ModelInferResponse(model_name=response.model_name, id=response.id, parameters=response.parameters)
        for tensor, (name, array) in zip(response.outputs, read_outputs(response).items(), strict=True):
            triton_codec.add_output(answer, name, tensor.datatype, array, typed=True)
        return answer

    def _metadata(self, model: FakeModel) -> pb.ModelMetadataResponse:
        answer = pb.ModelMetadataResponse(name=model.name, versions=[model.version], platform=model.platform)
        batch = [-1] if model.config.max_batch_size > 0 else []
        for ports, tensors in ((model.config.input, answer.inputs), (model.config.output, answer.outputs)):
            for port in ports:
                datatype = DATATYPES.get(port.data_type) or pb.DataType.Name(port.data_type).removeprefix("TYPE_")
                tensors.add(name=port.name, datatype=datatype, shape=[*batch, *port.dims])
        return answer

    def _statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        if request.name and request.name not in self.models:
            raise Refused(f"requested model '{request.name}' is not available", Code.INVALID_ARGUMENT)
        models = [self.models[request.name]] if request.name else list(self.models.values())
        stats = (model.statistics or pb.ModelStatistics(name=model.name, version=model.version) for model in models)
        return pb.ModelStatisticsResponse(model_stats=stats)

    def _index(self) -> pb.RepositoryIndexResponse:
        answer = pb.RepositoryIndexResponse()
        for model in self.models.values():
            if model.pushed:  # not listed in the index
                continue
            version = model.version if model.state else ""
            answer.models.add(name=model.name, version=version, state=model.state, reason=model.reason)
            if model.state == "UNLOADING":
                model.unloading -= 1
                if model.unloading <= 0:
                    model.state, model.reason = "UNAVAILABLE", "unloaded"
        return answer

    def _load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        name = request.repository_name if self.repository_first else request.model_name
        self._check_mode()
        files = [key for key in request.parameters if key.startswith("file:")]
        for key in request.parameters:
            if key != "config" and key not in files:
                raise Refused(f"unrecognized load parameter '{key}'.", Code.INVALID_ARGUMENT)
        model = self.models.get(name)
        if files:
            if "config" not in request.parameters:
                message = "if model files are provided, the 'config' parameter must also be provided"
                raise Refused(message, Code.INVALID_ARGUMENT)
            model = self.models.setdefault(name, FakeModel(name, pushed=True))
        if model is None:
            raise Refused(f"failed to load '{name}', failed to poll from model repository")
        if "config" in request.parameters:
            limit = json.loads(request.parameters["config"].string_param).get("max_batch_size", 0)
            model.config.max_batch_size = limit
        if model.load_error:
            model.state, model.reason = "UNAVAILABLE", model.load_error
            self.ready = False  # all other models keep serving
            raise Refused(f"failed to load '{name}', no version is available")
        model.broken = False
        model.state, model.reason = "LOADING" if model.loading else "READY", ""
        return pb.RepositoryModelLoadResponse()

    def _unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        name = request.repository_name if self.repository_first else request.model_name
        self._check_mode()
        model = self.models.get(name)
        names = [name]
        if model is not None and request.parameters["unload_dependents"].bool_param:
            names += [step.model_name for step in model.config.ensemble_scheduling.step]
        for each in names:
            found = self.models.get(each)
            if found is not None and found.state == "READY":
                found.state = "UNLOADING"
        return pb.RepositoryModelUnloadResponse()

    def _check_mode(self) -> None:
        if self.mode == "poll":
            raise Refused("explicit model load / unload is not allowed if polling is enabled", Code.UNAVAILABLE)
        if self.mode == "none":
            raise Refused("explicit model load / unload is not allowed", Code.UNAVAILABLE)


class _Calls(grpc.GenericRpcHandler):
    """The server's side of gRPC: finds the call by its path, counts it, and turns Refused into a status."""

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        path = handler_call_details.method
        name = path.rpartition("/")[2]
        if path != SERVICE + name:
            return None
        if name == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream, pb.ModelInferRequest.FromString, _bytes)
        read = getattr(pb, f"{name}Request")

        async def unary(request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
            await self._note(name, request, context)
            try:
                return await self._triton.call(name, request)
            except Refused as error:
                await context.abort(error.code, error.message)
            except asyncio.CancelledError:
                self._count_cancelled()
                raise

        return grpc.unary_unary_rpc_method_handler(unary, read.FromString, _bytes)

    async def _stream(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Message]:
        try:
            async for request in requests:
                await self._note("ModelStreamInfer", request, context)
                async for answer in self._triton.stream(request):
                    yield answer.infer_response if self._triton.unwrapped else answer
        except (asyncio.CancelledError, GeneratorExit):  # cancelled while the model works or an answer is sent
            self._count_cancelled()
            raise

    async def _note(self, name: str, request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        triton = self._triton
        sent = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        await triton.note(name, request, sent)
        if triton.key is not None and sent.get(triton.key[0]) != triton.key[1]:
            header = triton.key[0]
            await context.abort(Code.UNAVAILABLE, f"This protocol is restricted, expecting header '{header}'")

    def _count_cancelled(self) -> None:
        self._triton.cancelled += 1
        self._triton.left.set()


async def _single(answer: Any) -> pb.ModelInferResponse:
    if inspect.isawaitable(answer):
        answer = await answer
    assert isinstance(answer, pb.ModelInferResponse), answer
    return answer


async def _responses(answer: Any) -> AsyncIterator[pb.ModelInferResponse]:
    if isinstance(answer, (pb.ModelInferResponse, Awaitable)):
        yield await _single(answer)
        return
    async for response in answer:
        yield response


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()

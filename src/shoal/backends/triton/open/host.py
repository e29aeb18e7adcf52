"""The Triton that models are loaded into: its repository, its loaded models and, if Shoal started it, its process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.backends.base.backoff import Notify, retry_pauses
from shoal.backends.triton.control import Control
from shoal.backends.triton.engine import Endpoint
from shoal.backends.triton.naming import served_name, triton_name
from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.repository import ModelPush, Repository, RepositoryEntry, build_pushes
from shoal.backends.triton.repository_entry import EntryOptions, EntrySpec, ImageTower, Platform, triton_models
from shoal.backends.triton.server import TritonOptions, TritonServer, run_triton
from shoal.config.settings import ModelTable, Settings
from shoal.core.lifecycle.lifecycle import Entry
from shoal.errors import (
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    ModelFailed,
    ModelNotFound,
    ShoalError,
    TransportFailed,
)
from shoal.models.address import Address
from shoal.models.progress import Progress
from shoal.models.space import stored_space
from shoal.models.store import StoredModel
from shoal.pipelines.text.tokenizer import fingerprint

logger = logging.getLogger("shoal.triton")

_NO_BACKEND = "unable to find backend library"

LOOK_S = 2.0
"""Timeout in seconds of the index for a list: a server that does not answer by then is left out."""


class TritonHost:
    """A Triton server at `url`: host:port or a socket's path. `repository`: its folder here; None: files are pushed.

    If Shoal starts the server itself, `url` is empty until `wait_reachable` returns.
    """

    def __init__(self, settings: Settings, tritons: TritonConnections) -> None:
        self.url = settings.triton_url.rpartition("://")[2]
        self._tls = settings.triton_url.startswith("tritons://")
        self._settings = settings
        self._tritons = tritons
        self._server: asyncio.Future[TritonServer] | None = None
        self.repository = Repository(Path(settings.triton_repository)) if settings.triton_repository else None
        self._platforms: Sequence[str] = ()
        self._pushed_specs: dict[str, EntrySpec] = {}
        self._names: list[str] = []
        self._answers = True
        self._refresh_task: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def open_from_settings(
        cls, settings: Settings, tritons: TritonConnections, progress: Progress | None = None
    ) -> AsyncIterator[TritonHost | None]:
        """Yield the host of the settings: a server that Shoal starts, or one that they name, or None."""
        if not settings.triton and not settings.triton_url:
            yield None
            return
        host = cls(settings, tritons)
        if not settings.triton:
            try:
                yield host
            finally:
                await host._stop_refresh()
            return
        options = TritonOptions(
            home=Path(settings.home),
            repository=Path(settings.triton_repository) if settings.triton_repository else None,
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            offline=settings.offline,
        )
        host.url = ""
        host.repository = Repository(options.folder)
        host._server = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        running = asyncio.create_task(host._run(options, stop, progress), name="triton")
        try:
            yield host
        finally:
            stop.set()
            if not host._server.done():
                running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self, options: TritonOptions, stop: asyncio.Event, progress: Progress | None) -> None:
        """Run Shoal's own server until `stop`, as a task: the first fetch takes a while, and Shoal serves meanwhile."""
        assert self._server is not None
        try:
            async with run_triton(options, progress) as server:
                self.url, self._tls = server.url, False
                self._platforms = server.platforms
                self._server.set_result(server)
                await stop.wait()
        except ShoalError as error:
            logger.error("Triton did not start: %s", error.message)
            self._give_up(error)
        except Exception as error:  # a bug: callers that wait for the server must see it
            logger.exception("Triton failed to start for an unexpected reason")
            self._give_up(InternalError(f"Triton could not be started: {error!r}"))

    def _give_up(self, error: ShoalError) -> None:
        assert self._server is not None
        if not self._server.done():
            self._server.set_exception(error)
            self._server.exception()  # marks it as retrieved, in case nothing waits for the server

    @property
    def label(self) -> str:
        """The server as messages name it."""
        return f"Triton at {self.url}" if self.url else "Shoal's own Triton"

    async def wait_reachable(self, note: Notify) -> None:
        """Return once the server answers; `note` receives what it waits for. Raises SetupError if it cannot start."""
        if self._server is not None:
            note("waiting for Triton to start")
            await asyncio.shield(self._server)
        control = await self.control()
        for pause in retry_pauses():
            try:
                # Not readiness: a single model that failed to load makes it False.
                if await control.client.server_live(deadline=self._rpc_deadline()):
                    return
                reason = "it is not live yet"
            except (TransportFailed, DeadlineExceeded) as error:
                reason = error.message
            note(f"waiting for {self.label}: {reason}")
            await asyncio.sleep(pause)

    async def control(self) -> Control:
        """Return the control of the server. Raises TransportFailed if Shoal's own server has no address yet."""
        if self._server is not None and not self.url:
            raise TransportFailed(f"{self.label} has not started")
        return (await self._tritons.connect(self.url, tls=self._tls))[1]

    async def find_entry(self, name: str) -> RepositoryEntry | None:
        """Return the entry of a served name in the repository's folder; None also without a folder."""
        if self.repository is None:
            return None
        return await asyncio.to_thread(self.repository.find, name)

    async def is_foreign(self, name: str) -> bool:
        """Return whether the server has a model of that name that Shoal did not make."""
        if self.repository is not None:
            held = await self.find_entry(name)
            return held is not None and not held.managed
        if name in self._pushed_specs:
            return False
        control = await self.control()
        return any(one.name == triton_name(name) for one in await control.index(deadline=self._rpc_deadline()))

    async def has_model(self, name: str, source: Address) -> bool:
        """Return whether the repository holds what Shoal made from that source, here or on another machine."""
        held = await self.find_entry(name)
        return held is not None and held.managed and held.source == str(source)

    async def publish(self, name: str, stored: StoredModel, settings: Settings, *, text_in: bool | None = None) -> str:
        """Put a stored model where Triton can load it, and load it; return its folder, or `url`.

        Raises ConfigError, Forbidden (Shoal did not make the model of that name), and the server's error of the load.
        """
        there = await self.find_entry(name)
        try:
            return await self._write_and_load(name, stored, settings, text_in)
        except (ModelFailed, ModelNotFound) as error:
            if there is None:  # do not leave a model that cannot be loaded
                await self.remove(name)
            if isinstance(error, ModelNotFound) and self.repository is not None:
                raise ConfigError(
                    f"{self.label} does not find the model in {self.repository.folder}: triton_repository must"
                    " be the folder that it reads (its --model-repository), or empty to push the files",
                    param="triton_repository",
                ) from error
            raise

    async def _write_and_load(self, name: str, stored: StoredModel, settings: Settings, text_in: bool | None) -> str:
        where = await self.write(name, stored, settings, text_in=text_in)
        try:
            await self.load(name, settings)
            return where
        except ModelFailed as error:
            if settings.triton_platform != "auto" or self._platforms or _NO_BACKEND not in error.message:
                raise
            # Only a load shows a remote Triton's missing backends; the PyPI one has only the python backend.
            logger.info("%s has no onnxruntime backend: writing models for its python backend", self.label)
            self._platforms = ("python",)
            return await self._write_and_load(name, stored, settings, text_in)

    async def write(self, name: str, stored: StoredModel, settings: Settings, *, text_in: bool | None = None) -> str:
        """Put a model where Triton can load it; return the folder, or `url` if files are pushed to memory.

        Raises ConfigError and Forbidden.
        """
        spec = await asyncio.to_thread(build_entry_spec, name, stored, settings, self._platforms, text_in=text_in)
        if self.repository is None:
            self._pushed_specs[name] = spec
            return self.url
        await asyncio.to_thread(self.repository.write, spec)
        return str(self.repository.folder)

    async def unload(self, name: str, settings: Settings) -> None:
        """Unload a model; return at once if the server cannot be reached, since nothing is loaded there then."""
        try:
            control = await self.control()
            deadline = time.monotonic() + settings.load_timeout_s
            await control.unload(triton_name(name), dependents=True, deadline=deadline)
            if triton_name(name, "image") in await self._folders(name):
                await self._unload_both(name, control, deadline)
        except TransportFailed as error:
            logger.info("%s was not unloaded: %s", name, error.message)

    async def undo_publish(self, name: str, settings: Settings) -> None:
        """Undo the `publish` of a new model, complete or not: unload it, and remove it from the repository."""
        try:
            spec = self._pushed_specs.get(name)
            held = await self.find_entry(name)
            if spec is not None:
                await self._unload_pushed(spec, settings)
                self.forget(name)
            elif held is not None and held.managed:
                await self.unload(name, settings)
                await self.remove(name)
        except ShoalError as error:
            logger.warning("%s may remain on %s: %s", name, self.label, error.message)

    async def load(self, name: str, settings: Settings, *, beside: bool = True) -> None:
        """Load what was published, or reload it. An image tower beside a text tower comes first, and neither stays if
        the other fails; with `beside` False the image tower is left as it is."""
        control = await self.control()
        deadline = time.monotonic() + settings.load_timeout_s
        image = triton_name(name, "image")
        spec = self._pushed_specs.get(name)
        parts = await asyncio.to_thread(build_pushes, spec) if spec is not None else ()
        both = beside and image in await self._folders(name)
        if spec is None and both:
            await control.load(image, deadline=deadline)
        try:
            if spec is None:
                await control.load(triton_name(name), deadline=deadline)
            for one in parts:
                if beside or one.model.name != image:
                    await _push_model(control, one, deadline)
        except ModelFailed:
            if both:
                await self._unload_both(name, control, deadline)
            raise

    async def _unload_both(self, name: str, control: Control, deadline: float) -> None:
        """Unload both towers: one alone, or beside an older one, is not the model."""
        for model in (triton_name(name), triton_name(name, "image")):
            await control.unload(model, deadline=deadline)

    async def _folders(self, name: str) -> Sequence[str]:
        """Return the folders that Shoal made for a served name, by Triton's names."""
        if (spec := self._pushed_specs.get(name)) is not None:
            return [one.name for one in await asyncio.to_thread(triton_models, spec)]
        held = await self.find_entry(name)
        return held.folders if held is not None and held.managed else ()

    async def endpoint(self, name: str, table: ModelTable, settings: Settings) -> Endpoint:
        """Return the endpoint of a served name; if Triton takes its texts, that of the part that takes tokens, so that
        texts of all lengths share batches."""
        model = triton_name(name)
        spec = self._pushed_specs.get(name)
        if triton_name(name, "encoder") in await self._folders(name):
            model = triton_name(name, "encoder")
        endpoint = await self._tritons.endpoint(self._address(model), table, settings)
        unload = partial(self._unload_pushed, spec, settings) if spec is not None else None
        # The image tower's own engine reloads it.
        load = partial(self.load, name, settings, beside=False)
        return replace(endpoint, load=load, unload=unload, ensemble=triton_name(name))

    async def _unload_pushed(self, spec: EntrySpec, settings: Settings) -> None:
        """Unload the whole, then each of its parts, which Triton does not find as dependents of a pushed ensemble."""
        control = await self.control()
        deadline = time.monotonic() + settings.load_timeout_s
        for one in reversed(await asyncio.to_thread(triton_models, spec)):
            await control.unload(one.name, deadline=deadline)

    def forget(self, name: str) -> None:
        """Forget a pushed model, after the server unloaded it."""
        self._pushed_specs.pop(name, None)

    async def remove(self, name: str) -> bool:
        """Delete what Shoal made for a name; return False if there is nothing. Raises Forbidden for anything else."""
        if self.repository is not None:
            return await asyncio.to_thread(self.repository.remove, name)
        if self._pushed_specs.pop(name, None) is not None:
            return True
        if self._server is None and await self.is_foreign(name):
            raise Forbidden(
                f"{name} is in a model repository that Shoal cannot access: set triton_repository to its folder,"
                " or delete it there",
                param="model",
            )
        return False

    async def entries(self) -> list[Entry]:
        """Return the models of the folder, else of the server's index; none if the server does not answer."""
        if self.repository is not None:
            held = await asyncio.to_thread(self.repository.entries)
            return [
                Entry(
                    name=one.name,
                    source=one.source or str(self._address(one.folders[0])),
                    backend="triton",
                    size=one.size,
                    managed=one.managed,
                    created=one.created,
                )
                for one in held
            ]
        return [
            Entry(
                name=name,
                source=str(self._address(triton_name(name))),
                backend="triton",
                managed=name in self._pushed_specs,
            )
            for name in await self._index_names()
        ]

    async def _index_names(self) -> list[str]:
        """Return the models of the server's index. After a request without an answer, the next one runs in the
        background: interfaces ask for lists on every page, and must not wait for a dead server on each."""
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.create_task(self._refresh_index(), name="triton index")
        if self._answers:
            await asyncio.shield(self._refresh_task)
        return self._names

    async def _refresh_index(self) -> None:
        try:
            indexed = await (await self.control()).index(deadline=time.monotonic() + LOOK_S)
        except ShoalError as error:
            logger.debug("no index of %s: %s", self.label, error.message)
            self._names, self._answers = [], False
            return
        self._names = sorted({name for one in indexed if (name := served_name(one.name)) is not None})
        self._answers = True

    async def _stop_refresh(self) -> None:
        if self._refresh_task is not None:
            self._refresh_task.cancel()
            await asyncio.gather(self._refresh_task, return_exceptions=True)

    def _address(self, model: str) -> Address:
        return Address(scheme="tritons" if self._tls else "triton", target=self.url, model=model)

    def _rpc_deadline(self) -> float:
        return time.monotonic() + self._settings.connect_timeout_s


async def _push_model(control: Control, one: ModelPush, deadline: float) -> None:
    try:
        await control.load(one.model.name, config=one.model.config, files=one.files, deadline=deadline)
    except ModelFailed:
        if not one.ensemble or not await control.is_ready(one.model.name, deadline=deadline):
            raise


def build_entry_spec(
    name: str, stored: StoredModel, settings: Settings, platforms: Sequence[str] = (), *, text_in: bool | None = None
) -> EntrySpec:
    """Return what to write for a stored model. `platforms`: the backends of the server, if known.

    Raises ConfigError for conflicting settings, and for a model that an ensemble of texts does not support.
    """
    manifest = stored.manifest
    platform: Platform = "onnxruntime" if settings.triton_platform == "auto" else settings.triton_platform
    if settings.triton_platform == "auto" and platforms and "onnxruntime" not in platforms:
        platform = "python"
    if platform == "tensorrt":
        raise ConfigError(
            "a TensorRT plan must be built on the machine that runs it: build it with trtexec and put it into the"
            " repository, or use triton_platform onnxruntime with triton_accelerator tensorrt",
            param="triton_platform",
        )
    image = image_tower(stored)
    text = manifest.text_spec if image is None else manifest.text
    if text is not None and image is not None and settings.towers != "both":
        text, image = (text, None) if settings.towers == "text" else (None, image)
    graph = stored.graph if text is not None or image is None else image.graph
    return EntrySpec(
        name=name,
        graph=graph,
        text=text,
        image=image,
        contrast=manifest.contrast if text is not None and image is not None else None,
        data=_find_weights(graph),
        token_width=token_width(stored) if text is not None else -1,
        tokenizer=stored.tokenizer if text is not None else None,
        source=stored.manifest.address,
        space=stored_space(stored),
        tokenizer_fingerprint=fingerprint(stored.path, text.tokenizer) if text is not None else "",
        options=EntryOptions(
            platform=platform,
            max_batch_size=settings.max_batch_size,
            instances=settings.triton_instances,
            kind=settings.triton_kind,
            fp16=settings.triton_fp16,
            accelerator=settings.triton_accelerator,
            dynamic_batching=settings.triton_dynamic_batching,
            max_queue_size=settings.triton_queue_size,
            text_in=settings.triton_text_in if text_in is None else text_in,
        ),
    )


def image_tower(stored: StoredModel) -> ImageTower | None:
    """Return the image tower of a stored model, None if it takes no images. Blocks."""
    image = stored.manifest.image
    if image is None:
        return None
    graph = stored.path / image.graph
    return ImageTower(graph=graph, spec=image.spec, data=_find_weights(graph))


def _find_weights(graph: Path) -> tuple[Path, ...]:
    """Return a graph's external weights."""
    return tuple(path for path in graph.parent.glob(f"{graph.name}*data*") if path.is_file())


def token_width(stored: StoredModel) -> int:
    """Return the width of the graph's token vectors, -1 if it has none or leaves it open: a Triton backend rejects a
    configuration that is less specific about an output than the graph. Blocks."""
    text = stored.manifest.text_spec
    if not text.tokens:
        return -1
    if not any(module.startswith(("dense", "truncate")) for module in text.modules):
        return text.dimension // len(text.pooling.split("+"))
    try:
        import onnx
    except ImportError:  # the python platform takes any width; others may refuse to load it
        return -1
    graph = onnx.load(str(stored.graph), load_external_data=False).graph
    output = next(one for one in graph.output if one.name == text.tokens)
    return output.type.tensor_type.shape.dim[-1].dim_value or -1

"""Models in this process, without HTTP: the same gateway and lanes as `shoal serve`, behind a few plain methods.

One thread of its own runs one event loop for all callers, synchronous ones from any thread and asynchronous ones from
any loop alike: only there can their inputs meet in one batch. Nothing is changed for the process: no signals, no
logging, no port.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

import msgspec
import numpy as np

from shoal import config
from shoal.backends import parse_served
from shoal.config import LoadedConfig, check_setting_name
from shoal.config.schema import convert
from shoal.config.settings import BY_NAME
from shoal.core.image_text_scoring import score_image_texts
from shoal.errors import AddressError, ConfigError, InvalidValue, Unsupported, WrongType
from shoal.models.progress import Progress
from shoal.python.arguments import (
    check_options,
    each_of,
    index_of,
    kinds_of,
    read_all,
    text_ids_or_image,
    text_of,
    text_pair_or_image,
)
from shoal.python.background import Background
from shoal.python.conversing import Conversing
from shoal.python.images import ImageInput, to_image
from shoal.python.results import EmbedOptions, Label, Match, ModelInfo, Ranked
from shoal.types import (
    Classify,
    Context,
    Embed,
    Embedded,
    Image,
    Rerank,
    Scored,
    SparseVector,
    TextItem,
    TextPair,
    VectorKind,
    Vectors,
)

T = TypeVar("T")

CHUNK = 512
"""Items that go to the gateway at once: full batches on every slot, and others have their turn in between."""

_SERVER_SECTIONS = ("Server", "Logs")
"""Sections of settings that are about a server."""

_log = logging.getLogger("shoal")


def open(*models: str, config: str | os.PathLike[str] | None = None, **settings: Any) -> Shoal:
    """Run these models in this process: addresses as on the command line of `shoal serve`; none is what SHOAL_MODELS,
    or the file, or else the default says.

    `settings` go by the names of docs/settings.md and stand above SHOAL_* variables, these above the file `config`; no
    file is read that was not named. Answers at once: models load behind it, and `with`, `async with` or the first call
    wait for them. Raises ConfigError and AddressError for what can be seen before that.
    """
    return Shoal(_load_config(models, config, settings))


class Shoal(Conversing):
    """Models that run in this process, made by `shoal.open`; close it, or use it as a context manager.

    Every method may be called from any thread, the asynchronous ones from any event loop; many at once share batches.
    They raise ShoalErrors: RequestError for what the caller asked, CapacityError, BackendError, SetupError when a model
    could not be loaded. `model` "" is the default one. Lists of any length are cut up and put together again. A call
    that is cancelled, or interrupted, leaves the queue.
    """

    def __init__(self, loaded: LoadedConfig, progress: Progress | None = None) -> None:
        """`progress` sees downloads and conversions, from threads."""
        super().__init__(Background(loaded, progress))

    # -- the models, synchronous

    @overload
    def embed(self, texts: Sequence[TextItem | ImageInput], **options: Unpack[EmbedOptions]) -> Vectors: ...

    @overload
    def embed(
        self, texts: Sequence[TextItem | ImageInput], *, outputs: Sequence[VectorKind], **options: Unpack[EmbedOptions]
    ) -> Embedded: ...

    def embed(
        self,
        texts: Sequence[TextItem | ImageInput],
        *,
        outputs: Sequence[VectorKind] | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Vectors | Embedded:
        """float32 [texts, dimension], one row a text in their order; with `outputs` every kind of vector named there,
        with the tokens read. A text may be a list of the model's own token ids. Options as in `shoal.types.Embed`.

        In place of a text there may be an image, for models that take them: its file's bytes, a Path, or one of
        Pillow's. A str is always a text."""
        return self._background.wait(self._embed(texts, outputs, options))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        model: str = "",
        truncate: bool | None = None,
        instruction: str | None = None,
    ) -> list[Ranked]:
        """The documents by descending score, of equal ones the first first; only the best `top_n` where that is given
        (0: all of them). A model that only embeds ranks by its vectors. `instruction`: what makes a document relevant,
        for rerankers made from language models; "" is the model's default, as None."""
        options = _task_options(model, raw_scores, truncate) | {"instruction": instruction}
        return self._background.wait(self._rerank(query, documents, top_n, options))

    def classify(
        self,
        inputs: Sequence[str | TextPair | ImageInput],
        *,
        raw_scores: bool = False,
        model: str = "",
        truncate: bool | None = None,
    ) -> list[list[Label]]:
        """The labels of each text, pair of texts or image, by descending score."""
        return self._background.wait(self._classify(inputs, _task_options(model, raw_scores, truncate)))

    def rank(self, image: ImageInput, texts: Sequence[str], *, model: str = "") -> list[Match]:
        """The texts by descending score: which of them describes the image best. Raises Unsupported for a model that
        does not compare images with texts."""
        return self._background.wait(self._rank(image, texts, model))

    def models(self) -> list[ModelInfo]:
        """The served models, the default one first."""
        return self._background.wait(self._list_models())

    # -- the same, asynchronous

    @overload
    async def aembed(self, texts: Sequence[TextItem | ImageInput], **options: Unpack[EmbedOptions]) -> Vectors: ...

    @overload
    async def aembed(
        self, texts: Sequence[TextItem | ImageInput], *, outputs: Sequence[VectorKind], **options: Unpack[EmbedOptions]
    ) -> Embedded: ...

    async def aembed(
        self,
        texts: Sequence[TextItem | ImageInput],
        *,
        outputs: Sequence[VectorKind] | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Vectors | Embedded:
        """As `embed`."""
        return await self._background.wait_async(self._embed(texts, outputs, options))

    async def arerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        model: str = "",
        truncate: bool | None = None,
        instruction: str | None = None,
    ) -> list[Ranked]:
        """As `rerank`."""
        options = _task_options(model, raw_scores, truncate) | {"instruction": instruction}
        return await self._background.wait_async(self._rerank(query, documents, top_n, options))

    async def aclassify(
        self,
        inputs: Sequence[str | TextPair | ImageInput],
        *,
        raw_scores: bool = False,
        model: str = "",
        truncate: bool | None = None,
    ) -> list[list[Label]]:
        """As `classify`."""
        return await self._background.wait_async(self._classify(inputs, _task_options(model, raw_scores, truncate)))

    async def arank(self, image: ImageInput, texts: Sequence[str], *, model: str = "") -> list[Match]:
        """As `rank`."""
        return await self._background.wait_async(self._rank(image, texts, model))

    async def amodels(self) -> list[ModelInfo]:
        """As `models`."""
        return await self._background.wait_async(self._list_models())

    # -- its life

    def __enter__(self) -> Self:
        try:
            self._background.wait_ready()
        except BaseException:  # also when it is interrupted: nobody else will close it
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            await self._background.ready()
        except BaseException:  # as in `__enter__`
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def close(self) -> None:
        """Free everything; calls under way fail with Unavailable. A second call does nothing more."""
        self._background.close()

    async def aclose(self) -> None:
        """As `close`."""
        await asyncio.to_thread(self.close)

    # -- checked where the caller is, done on the loop

    async def _list_models(self) -> list[ModelInfo]:
        cards = [(card.name, card.facts) for card in self._background.gateway.models()]
        return [ModelInfo(name, facts.tasks, facts.modalities) for name, facts in cards if facts is not None]

    def _embed(
        self, texts: Sequence[TextItem | ImageInput], outputs: Sequence[VectorKind] | None, options: EmbedOptions
    ) -> Coroutine[Any, Any, Vectors | Embedded]:
        inputs = each_of(texts, "texts", text_ids_or_image)
        if options.get("dimensions") is not None:
            options["dimensions"] = index_of(options["dimensions"], "dimensions")
        options.setdefault("model", "")
        # Embed refuses options that it does not have, with a TypeError as of any call.
        whole = Embed(inputs=[], outputs=kinds_of(outputs), **options)
        check_options(whole)
        return self._run_embed(whole, inputs, plain=outputs is None)

    async def _run_embed(
        self, whole: Embed, inputs: Sequence[TextItem | Image | Path], *, plain: bool
    ) -> Vectors | Embedded:
        items = await read_all(inputs)
        tasks = [msgspec.structs.replace(whole, inputs=part) for part in _split(items)]
        found = cast(list[Embedded], await self._background.results(tasks))
        return _concatenate_vectors(found) if plain else _merge_results(found)

    def _rerank(
        self, query: str, documents: Sequence[str], top_n: int | None, options: dict[str, Any]
    ) -> Coroutine[Any, Any, list[Ranked]]:
        texts = each_of(documents, "documents", text_of)
        if top_n is not None and index_of(top_n, "top_n") < 0:
            raise InvalidValue(f"top_n is {top_n}: pass the number of results, or 0 for all", param="top_n")
        whole = Rerank(queries=[text_of(query, "query")], documents=texts, **options)
        check_options(whole)
        whole = msgspec.structs.replace(whole, instruction=whole.instruction or None)
        tasks = [msgspec.structs.replace(whole, documents=part) for part in _split(texts)]
        return self._run_rerank(tasks, texts, top_n or None)

    async def _run_rerank(self, tasks: list[Rerank], texts: list[str], top_n: int | None) -> list[Ranked]:
        found = cast(list[Scored], await self._background.results(tasks))
        scores = [float(score) for each in found for score in each.scores[:, 0]]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [Ranked(index, scores[index], texts[index]) for index in order[:top_n]]

    def _classify(
        self, inputs: Sequence[str | TextPair | ImageInput], options: dict[str, Any]
    ) -> Coroutine[Any, Any, list[list[Label]]]:
        listed = each_of(inputs, "inputs", text_pair_or_image)
        whole = Classify(inputs=[], **options)
        check_options(whole)
        return self._run_classify(whole, listed)

    async def _run_classify(
        self, whole: Classify, inputs: Sequence[str | TextPair | Image | Path]
    ) -> list[list[Label]]:
        tasks = [msgspec.structs.replace(whole, inputs=part) for part in _split(await read_all(inputs))]
        found = cast(list[Scored], await self._background.results(tasks))
        gateway = self._background.gateway
        facts = gateway.model(gateway.resolve(tasks[0].model, "classify")[0]).facts
        labels = facts.labels if facts is not None else ()
        return [
            sorted(map(Label, labels, row.tolist()), key=lambda each: -each.score)
            for each in found
            for row in each.scores
        ]

    def _rank(self, image: ImageInput, texts: Sequence[str], model: str) -> Coroutine[Any, Any, list[Match]]:
        source = to_image(image)
        if source is None:
            raise WrongType(
                f"image must be the bytes of an image file, a Path or a Pillow image, not {type(image).__name__}",
                param="image",
            )
        listed = each_of(texts, "texts", text_of)
        check_options(Embed(model=model, inputs=listed))
        return self._run_rank(source, listed, model)

    async def _run_rank(self, source: Image | Path, texts: list[str], model: str) -> list[Match]:
        gateway = self._background.gateway
        gateway.check_modality(model, "image")
        name = gateway.resolve(model, "embed")[0]
        facts = gateway.model(name).facts
        if facts is None or facts.contrast is None:
            raise Unsupported(
                f"the model {name!r} does not compare images with texts: name a CLIP or SigLIP model", param="model"
            )

        async def run(whole: Embed, ctx: Context) -> Embedded:
            tasks = [msgspec.structs.replace(whole, inputs=part) for part in _split([*whole.inputs])]
            return _merge_results(await self._background.results(tasks))

        ctx = Context(id="rank", deadline=math.inf)  # each part has its own
        found = await score_image_texts(run, name, await read_all([source]), texts, ctx, facts.contrast)
        rows = zip(texts, found.cosine[0].tolist(), found.scores[0].tolist(), strict=True)
        matches = [Match(index, *row) for index, row in enumerate(rows)]
        # Far from the best, probabilities are all 0.
        return sorted(matches, key=lambda each: (-each.score, -each.cosine))


def _load_config(
    models: Sequence[object], file: str | os.PathLike[str] | None, settings: Mapping[str, Any]
) -> LoadedConfig:
    for name in settings:
        check_setting_name(name)
        if BY_NAME[name].section in _SERVER_SECTIONS:
            raise ConfigError(f"{name} is a setting of the server, which is not used here: omit it", param=name)
        if settings[name] is not None:
            convert(BY_NAME[name], settings[name], name)  # by its name here, which is no flag's
    for model in models:
        if not isinstance(model, str):
            hint = (
                "pass several as separate arguments"
                if isinstance(model, list | tuple)
                else "for a folder, use file:PATH"
            )
            raise AddressError(f"an address must be a string, not {type(model).__name__}: {hint}")
    # Whoever calls from this process waits for its own work: nobody else is kept waiting by its queue.
    settings = {"max_queue_ms": 0.0, **settings}
    loaded = config.load({**settings, config.MODELS: models}, os.environ, None if file is None else Path(file))
    for address in loaded.served:
        parse_served(loaded.resolve_argument(address))
    for warning in loaded.warnings:
        _log.warning("%s", warning)
    return loaded


def _task_options(model: str, raw_scores: bool, truncate: bool | None) -> dict[str, Any]:
    return {"model": model, "raw_scores": raw_scores, "truncate": truncate}


def _split(items: list[T]) -> list[list[T]]:
    """At least one, so that what is empty is refused by the gateway as everywhere."""
    return [items[start : start + CHUNK] for start in range(0, len(items), CHUNK)] or [items]


def _concatenate_vectors(found: Sequence[Embedded]) -> Vectors:
    """The caller's own: a row of one text may be a view of a whole batch, or of a cache."""
    vectors: Vectors = np.concatenate([each.vectors for each in found])
    return vectors


def _merge_results(found: Sequence[Embedded]) -> Embedded:
    """All of it the caller's own, as `_concatenate_vectors` says."""
    largest = max((each.facts for each in found), key=lambda facts: facts.size)
    facts = msgspec.structs.replace(
        largest,
        batches=sum(each.facts.batches for each in found),
        cached=sum(each.facts.cached for each in found),
        queue_ms=max(each.facts.queue_ms for each in found),
        prepare_ms=max(each.facts.prepare_ms for each in found),
        infer_ms=max(each.facts.infer_ms for each in found),
    )
    return Embedded(
        vectors=_concatenate_vectors(found),
        tokens=[count for each in found for count in each.tokens],
        truncated=sum(each.truncated for each in found),
        facts=facts,
        space=found[0].space,
        sparse=[SparseVector(row.indices.copy(), row.values.copy()) for each in found for row in each.sparse],
        token_vectors=[row.copy() for each in found for row in each.token_vectors],
        multi_vectors=[row.copy() for each in found for row in each.multi_vectors],
    )

"""Run the task of a request, the last step before a reply in every dialect with batched tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast, overload

import msgspec

from shoal.http.images import ImageReader
from shoal.http.json.refused import UnreadField
from shoal.http.request import Request
from shoal.surfaces.shared import input_parsing
from shoal.types import BatchTask, Classify, Embed, Embedded, Image, Rerank, Result, Scored, TextItem

if TYPE_CHECKING:
    from shoal.core.gateway import Gateway
    from shoal.core.registry import Model


@overload
async def run_task(gateway: Gateway, request: Request, task: Embed, model: Model | None = None) -> Embedded: ...


@overload
async def run_task(
    gateway: Gateway, request: Request, task: Rerank | Classify, model: Model | None = None
) -> Scored: ...


async def run_task(gateway: Gateway, request: Request, task: BatchTask, model: Model | None = None) -> Result:
    """Run the task within the request's deadline, and record model, items and result for the log and the headers.

    `model`: the one that the task names, if the caller has found it. Raises what the gateway raises.
    """
    request.model = task.model
    request.items = len(task.documents if isinstance(task, Rerank) else task.inputs)
    result = await gateway.run(task, request.context(), model)
    request.result = result
    return result


class EmbeddedInputs(NamedTuple):
    """The result, and in `text_tokens` the number of tokens that the model read; images have none."""

    result: Embedded
    text_tokens: int


async def embed_inputs(
    gateway: Gateway,
    image_reader: ImageReader,
    request: Request,
    task: Embed,
    inputs: Sequence[input_parsing.Input],
    headers: UnreadField = msgspec.UNSET,
    model: Model | None = None,
) -> EmbeddedInputs:
    """Run `task`, which has no inputs yet, on texts, token ids and images. `headers` are for fetching the images.

    Raises what `input_parsing.read_images` and the gateway raise.
    """
    request.model, request.items = task.model, len(inputs)
    if not input_parsing.has_images(inputs):
        plain = cast(Sequence[TextItem | Image], inputs)
        result = await run_task(gateway, request, msgspec.structs.replace(task, inputs=plain), model)
        return EmbeddedInputs(result, sum(result.tokens))
    read = await input_parsing.read_images(image_reader, inputs, request, headers)
    result = await run_task(gateway, request, msgspec.structs.replace(task, inputs=read), model)
    return EmbeddedInputs(result, input_parsing.count_text_tokens(read, result.tokens))

"""Opens models from files on the Triton of the settings: written into its repository, or already there."""

from __future__ import annotations

import asyncio
from functools import partial

from shoal.backends.base.backend import Resources, Target
from shoal.backends.triton.open.host import TritonHost
from shoal.backends.triton.open.models import open_triton
from shoal.backends.triton.open.targets import make_target
from shoal.core.lifecycle.loading import ProgressReporter
from shoal.core.protocols import Runner
from shoal.errors import ConfigError
from shoal.models.store import StoredModel


async def open_files(target: Target, host: TritonHost, resources: Resources, report: ProgressReporter) -> Runner:
    """Load a model from files into Triton and open it. A bare name also opens a model that is already there, as it is.
    Raises SetupError, and the server's error of the load."""
    if len(target.addresses) > 1:
        raise ConfigError(f"{target.name}: in Triton a model has one address: for more instances set triton_instances")
    await host.wait_reachable(report)
    if await is_in_repository(target, host, resources):
        return await _open_existing(target, host, resources, None, report)
    stored = await resources.prepare(target, await resources.source(target), report)
    if stored.manifest.generation is not None:
        raise ConfigError(
            f"{target.name} is a language model, which Shoal does not load into Triton: run it here with "
            f'`backend = "local"` in [models."{target.name}"], or serve it with Triton as in docs/triton-llm.md'
        )
    report("writing the model into Triton's repository")
    new = await host.find_entry(target.name) is None
    try:
        await host.publish(target.name, stored, target.settings, text_in=target.options.text_in)
        return await _open_existing(target, host, resources, stored, report)
    except BaseException:  # a cancelled load must not leave a partial one either
        if new:  # an older entry may be in use by others
            await host.undo_publish(target.name, target.settings)
        raise


async def is_in_repository(target: Target, host: TritonHost, resources: Resources) -> bool:
    """Return whether Triton's repository has the model, to use as it is: one that Shoal did not make, under a bare
    name, or one that another Shoal made from files that are not here."""
    if target.name_only and await host.is_foreign(target.name):
        return True
    source = await resources.source(target)
    if await asyncio.to_thread(resources.store.find, source) is not None:
        return False
    return await host.has_model(target.name, source)


async def _open_existing(
    target: Target, host: TritonHost, resources: Resources, stored: StoredModel | None, report: ProgressReporter
) -> Runner:
    """Open a model that is in Triton's repository or was pushed. `stored`: the files that it was made from here."""
    report("waiting for Triton to load the model")
    there = await host.endpoint(target.name, target.table, target.settings)
    lanes, talk = partial(resources.lanes, target), partial(resources.generation, target)
    return await open_triton(make_target(target, [there], resources, report, stored), lanes, talk, report)

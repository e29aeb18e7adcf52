"""Notes what clients have loaded for the next model process, if this one ends. Part of the composition root."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from pathlib import Path

from shoal.core.lifecycle.lifecycle import Lifecycle
from shoal.core.lifecycle.loading import Plan
from shoal.errors import ShoalError

LOOK_S = 0.1
"""Interval of checks whether clients have loaded or unloaded a model."""

logger = logging.getLogger("shoal")


async def restore_loaded(lifecycle: Lifecycle, file: Path) -> None:
    """Begin to load the models that the file lists, except those that slept."""
    for plan, is_sleeping in await asyncio.to_thread(_read, file):
        try:
            lifecycle.restore(plan, is_sleeping=is_sleeping)
        except ShoalError as error:
            logger.warning("%s is not loaded again: %s", plan.name, error.message)


async def note_loaded(lifecycle: Lifecycle, file: Path) -> None:
    """List in the file what clients have loaded; never returns.

    A model is not listed while it loads: one that ends the process then does not end the next one. A list that cannot
    be written is written again when it changes.
    """
    listed: list[tuple[Plan, bool]] | None = None
    while True:
        if listed != (listed := lifecycle.restorable_plans()):
            try:
                await asyncio.to_thread(_write, file, listed)
            except OSError as error:  # a full disk must not end the process
                logger.warning("loaded models will not be loaded again if the model process ends: %s", error)
        await asyncio.sleep(LOOK_S)


def _read(file: Path) -> list[tuple[Plan, bool]]:
    try:
        plans: list[tuple[Plan, bool]] = pickle.loads(file.read_bytes())
    except FileNotFoundError:  # no process before this one had any
        return []
    except OSError as error:
        logger.warning("models that clients had loaded are not loaded again: %s", error)
        return []
    return plans


def _write(file: Path, plans: list[tuple[Plan, bool]]) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(pickle.dumps(plans))
    os.replace(new, file)

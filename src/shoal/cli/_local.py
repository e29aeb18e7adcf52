"""Models in this process, for commands that ask one and end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.config import LoadedConfig

if TYPE_CHECKING:
    from shoal.python.api import Shoal


@contextmanager
def run_model(loaded: LoadedConfig, address: str) -> Iterator[Shoal]:
    """Run the model at `address`, or else the first configured one, and draw the progress of its loading.

    Raises SetupError if it cannot be loaded.
    """
    from shoal.cli.progress import TerminalProgress
    from shoal.python.api import Shoal

    served = (address,) if address else loaded.served[:1]
    with ExitStack() as stack:
        with TerminalProgress(doing=f"loading {served[0] if served else 'the model'}") as progress:
            models = stack.enter_context(Shoal(replace(loaded, served=served), progress))
        yield models

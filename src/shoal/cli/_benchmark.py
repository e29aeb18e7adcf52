"""What `shoal bench embed` and `shoal bench chat` share: running a measurement, and its report as JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shoal.errors import SetupError, ShoalError, TransportFailed

T = TypeVar("T")


def run_benchmark(start: Callable[[], Coroutine[Any, Any, T]], url: str) -> T:
    """Run the measurement that `start` returns; Ctrl-C before that leaves none behind that was never awaited.

    Raises TransportFailed if nothing listens at `url`, and SetupError with the server's reason if it rejects the first
    request.
    """
    import uvloop

    from shoal.cli.progress import Waiting

    try:
        with Waiting(f"measuring {url}"):
            return uvloop.run(start())
    except ShoalError:
        raise
    except OSError as error:
        raise TransportFailed(f"no server at {url} ({error.strerror or error}): start one with `shoal serve`") from None
    except (RuntimeError, ValueError) as error:
        raise SetupError(str(error)) from None


def to_json(report: dict[str, Any]) -> str:
    """Format a report, with the machine that the client ran on."""
    import msgspec

    from shoal.bench.machine import describe_machine

    whole = {**report, "client_machine": describe_machine()}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode()

"""Rules for every test: no outside settings or signals, no blocked event loop, no dependence on speed, no silent skip
in CI.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from functools import cache
from typing import Any

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

from shoal.server import garbage_collection

# A test must not fail because the machine is slow or busy. How many examples a property is tried with is decided here
# alone. Every run draws new ones, except in CI, where Hypothesis always draws the same.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
# For a second run of the same tests with other library versions, and for a search before a release.
settings.register_profile("few", settings.get_profile("unhurried"), max_examples=5)
settings.register_profile("thorough", settings.get_profile("unhurried"), max_examples=500, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unhurried"))

# Tests leave few cycles and many objects that live on: at Python's defaults, collections took a fifth of the processor
# time of `tests/surfaces`, and one of all generations stopped a test's event loop for half a second and more.
gc.set_threshold(50_000, 20, 50)

# A script's background jobs ignore SIGINT, and so would every process that a test starts, because that is inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """CI has everything that tests need, so a skip there is a gap in the checks."""
    if os.environ.get("CI") == "true" and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a test may not be skipped in CI: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid_skip(report)
    return report


_dead_workers = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    if error is not None:
        node.config.stash[_dead_workers] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A dead worker of pytest-xdist leaves tests that did not run: another status than that of tests that failed."""
    if _dead_workers in session.config.stash:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's settings must not affect a test."""
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_collection_for_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in this process would collect and freeze what all tests together hold."""
    monkeypatch.setattr(garbage_collection, "collect_and_freeze", lambda: None)


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model opened in this process would compute for a second before it serves, and again whenever it is idle. Tests
    of the warm-up ask for it."""
    from shoal.backends.local.options import EngineOptions

    defaults = EngineOptions.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "warm_up_s", 0.0)


@pytest.fixture(autouse=True)
def blocking_the_loop_fails() -> Iterator[BlockBuster]:
    """Shoal's own code may not read files, sleep or wait for locks on an event loop; tests may."""
    guard = _block_buster()
    guard.activate()
    try:
        yield guard
    finally:
        guard.deactivate()


@cache
def _block_buster() -> BlockBuster:
    guard = BlockBuster("shoal")
    # The start of a process blocks anyway, whoever starts it, until the program is executed.
    guard.functions["os.read"].can_block_in("subprocess.py", {"_execute_child"})
    # gRPC joins its own thread once its last channel is collected, in whatever runs then.
    guard.functions["threading.Lock.acquire"].can_block_in("threading.py", {"_wait_for_tstate_lock"})
    return guard

"""What holds for every test: no settings from outside, no blocking of the event loop, no silent skip in CI."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """CI has everything that a test may need, so a skip there is a hole in what was checked."""
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


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own settings must not decide a test."""
    for name in [name for name in os.environ if name.startswith("SHOAL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def blocking_the_loop_fails() -> Iterator[BlockBuster]:
    """Shoal's own code may not read files, sleep or wait for locks on an event loop; what tests do is their affair."""
    with blockbuster_ctx("shoal") as guard:
        yield guard

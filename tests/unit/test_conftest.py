"""The rules that tests/conftest.py applies to every other test."""

from __future__ import annotations

import ast
import os
import sys
import time
import tomllib
from pathlib import Path

import pytest
from blockbuster import BlockingError

RULES = Path(__file__).parents[1] / "conftest.py"
ONE_SKIP = "import pytest\n\ndef test_one():\n    pytest.skip('no GPU')\n"
ONE_XFAIL = "import pytest\n\n@pytest.mark.xfail\ndef test_one():\n    assert False\n"

pytest_plugins = ["pytester"]


@pytest.fixture
def run_with_rules(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(RULES.read_text())
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    return pytester


@pytest.mark.parametrize("group", ["dev-base", "clients-base"])
def test_every_test_environment_has_the_imports_of_the_rules(group: str) -> None:
    """They are imported everywhere, as Shoal is: with one package missing, no test can run."""
    project = tomllib.loads((RULES.parents[1] / "pyproject.toml").read_text())
    there = {wanted.partition(">")[0] for wanted in project["dependency-groups"][group] if isinstance(wanted, str)}
    read = ast.walk(ast.parse(RULES.read_text()))
    imported = {node.module.partition(".")[0] for node in read if isinstance(node, ast.ImportFrom) and node.module}
    assert imported - sys.stdlib_module_names <= there | {"shoal"}


def test_child_processes_receive_ctrl_c(run_with_rules: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for tests in a script's background, where SIGINT is ignored and inherited by child processes."""
    run_with_rules.makepyfile(
        """
        import signal, subprocess, sys

        PROGRAM = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"

        def test_one():
            assert subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True).returncode == -signal.SIGINT
        """
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    script = f"trap '' INT; exec {sys.executable} -m pytest -p no:cacheprovider"
    assert run_with_rules.run("sh", "-c", script).ret == 0


def test_a_skip_fails_in_ci(run_with_rules: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CI=true a skipped test fails, and the report keeps its reason."""
    monkeypatch.setenv("CI", "true")
    run_with_rules.makepyfile(ONE_SKIP)
    result = run_with_rules.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*may not be skipped in CI: *no GPU*"])


def test_a_skipped_module_fails_in_ci(run_with_rules: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that skips itself during collection also counts."""
    monkeypatch.setenv("CI", "true")
    run_with_rules.makepyfile("import pytest\npytest.importorskip('no_such_module')\n")
    run_with_rules.runpytest_inprocess().assert_outcomes(errors=1)


def test_a_skip_is_allowed_outside_ci(run_with_rules: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a developer's machine a skip is a skip."""
    monkeypatch.delenv("CI", raising=False)
    run_with_rules.makepyfile(ONE_SKIP)
    run_with_rules.runpytest_inprocess().assert_outcomes(skipped=1)


def test_an_expected_failure_is_allowed_in_ci(run_with_rules: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest reports xfail as skipped; it stays allowed in CI."""
    monkeypatch.setenv("CI", "true")
    run_with_rules.makepyfile(ONE_XFAIL)
    run_with_rules.runpytest_inprocess().assert_outcomes(xfailed=1)


def test_settings_of_the_machine_are_removed(run_with_rules: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees a SHOAL_ variable that it did not set."""
    monkeypatch.setenv("SHOAL_PORT", "1")
    run_with_rules.makepyfile("import os\n\ndef test_one():\n    assert 'SHOAL_PORT' not in os.environ\n")
    run_with_rules.runpytest_inprocess().assert_outcomes(passed=1)
    assert os.environ["SHOAL_PORT"] == "1"


async def test_blocking_in_shoal_fails() -> None:
    """Code in a Shoal module may not sleep on the loop."""
    code = compile("import time\ntime.sleep(0.001)\n", str(Path(_shoal_file()).with_name("errors.py")), "exec")
    with pytest.raises(BlockingError):
        exec(code, {"__name__": "shoal.errors"})


async def test_blocking_in_a_test_is_allowed() -> None:
    """Only frames in Shoal are checked, so a test may prepare its files without threads."""
    time.sleep(0.001)  # noqa: ASYNC251


def _shoal_file() -> str:
    import shoal

    return str(shoal.__file__)

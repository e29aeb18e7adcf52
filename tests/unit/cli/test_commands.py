"""The whole command: names, versions, help, errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import __version__, cli
from shoal.cli import COMMANDS, app
from shoal.config.settings import SETTINGS

runner = CliRunner()

HEAVY = ("openvino", "onnx", "onnxruntime", "numpy", "huggingface_hub", "tokenizers", "uvicorn", "starlette", "rich")


def test_version_names_the_runtime_environment() -> None:
    """Shoal, Python and the engines are listed, one per line."""
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    lines = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert lines["shoal"] == __version__
    assert {"python", "openvino", "onnxruntime", "tokenizers"} <= set(lines)


def test_the_command_imports_nothing_heavy() -> None:
    """`shoal --version` answers at once, since only the running command is imported."""
    code = f"import sys, shoal.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    """Each entry of the table resolves, and its help starts with its purpose."""
    result = runner.invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Usage: shoal {name}" in result.output or f"Usage: root {name}" in result.output


def test_help_lists_the_commands() -> None:
    """The commands are in the order of the table."""
    result = runner.invoke(app, ["--help"])
    places = [result.output.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)


def test_serve_has_a_flag_for_every_setting() -> None:
    """The help has flag, variable and default of each setting."""
    text = " ".join(runner.invoke(app, ["serve", "--help-all"], env={"COLUMNS": "400"}).output.split())
    for row in SETTINGS:
        assert f" {row.flag} " in text, row.name
        assert f"(env {row.env}" in text, row.name


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sreve"], "sreve is not a command: did you mean `shoal serve`?"),
        (["ls"], "ls is not a command: did you mean `shoal list`?"),
        (["xyzzy"], "xyzzy is not a command: `shoal --help` lists them"),
        (["config", "chek"], "chek is not a command: did you mean `shoal config check`?"),
        (["triton", "stauts"], "stauts is not a command: did you mean `shoal triton status`?"),
        (["serve", "--prot", "80"], "No such option: --prot: did you mean --port?"),
        (["pull", "--max-batchsize", "8"], "No such option: --max-batchsize: --help-all lists them all"),
        (["serve", "--triton-http-host", "h"], "did you mean --triton-"),
    ],
)
def test_a_mistyped_word_is_a_usage_error_with_the_likely_one(words: list[str], hint: str) -> None:
    """Commands, names that people know from elsewhere, and flags; flags of other servers are no suggestion."""
    result = runner.invoke(app, words, prog_name="shoal")
    assert result.exit_code == 2
    assert hint in result.output
    assert "--triton_http_host" not in result.output


def test_an_unknown_flag_is_a_usage_error() -> None:
    """Exit code 2."""
    assert runner.invoke(app, ["serve", "--prot", "80"]).exit_code == 2


@pytest.mark.parametrize("arguments", [["--port", "99999"], ["--precision", "fp8"], ["--max-batch-ms", "soon"]])
def test_a_bad_value_of_a_flag_is_a_usage_error(arguments: list[str]) -> None:
    """One line names the flag and the valid values; exit code 2."""
    result = runner.invoke(app, ["config", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {arguments[0]}: must be ")
    assert len(result.stderr.splitlines()) == 1


def test_a_bad_variable_is_a_failure() -> None:
    """The command line is correct, so the exit code is 1; the error names the variable."""
    result = runner.invoke(app, ["config"], env={"SHOAL_PORT": "eighty"})
    assert result.exit_code == 1
    assert result.stderr.startswith("error: SHOAL_PORT: must be a whole number")


def test_an_interrupt_is_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no error of the program."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.config.load", raise_interrupt)
    result = runner.invoke(app, ["config"])
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception is not shown as a usage error."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("shoal.config.load", broken)
    assert isinstance(runner.invoke(app, ["config"]).exception, ZeroDivisionError)


def test_main_runs_the_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The console script and `python -m shoal` are the same."""
    monkeypatch.setattr(sys, "argv", ["shoal", "--version"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    assert capfd.readouterr().out.startswith(f"shoal {__version__}\n")


class TestConfig:
    def test_json_holds_values_and_sources(self, tmp_path: Path) -> None:
        """The folder's file counts, flags win, and keys are masked."""
        (tmp_path / "shoal.toml").write_text('max_inputs = 7\nport = 1\n[models."m"]\nbackends = ["fake:"]\n')
        result = runner.invoke(app, ["config", "--json", "--port", "2", "--api-key", "abc"], env={"SHOAL_STREAMS": "3"})
        output = json.loads(result.stdout)
        settings = output["settings"]
        assert set(settings) == {row.name for row in SETTINGS}
        assert settings["port"] == {"value": 2, "source": "--port"}
        assert settings["max_inputs"] == {"value": 7, "source": str(tmp_path / "shoal.toml")}
        assert settings["streams"] == {"value": 3, "source": "SHOAL_STREAMS"}
        assert settings["api_key"] == {"value": ["****"], "source": "--api-key"}
        assert output["models"]["value"] == ["m=fake:"]

    def test_the_table_shows_every_setting(self, tmp_path: Path) -> None:
        """Name, value and source are shown, including tables of models."""
        file = tmp_path / "other.toml"
        file.write_text('[models."m"]\nbackends = ["fake:"]\nmax_batch_size = 9\n')
        result = runner.invoke(app, ["config", "--config", str(file), "--no-truncate"], env={"COLUMNS": "300"})
        rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
        assert {row.name for row in SETTINGS} <= set(rows)
        assert rows["truncate"] == ["false", "--no-truncate"]
        assert rows['models."m".max_batch_size'] == ["9", str(file)]

    def test_a_preset_and_its_variables_are_sources(self) -> None:
        """`--as` shows the settings from the other server's environment."""
        environ = {"TRITON_SERVER_URL": "http://t", "COLUMNS": "300"}
        result = runner.invoke(app, ["config", "--as", "triton-grpc-proxy"], env=environ)
        rows = {line.split()[0]: line.strip().split(maxsplit=2)[1:] for line in result.stdout.splitlines()}
        assert rows["port"] == ["8080", "preset triton-grpc-proxy"]
        assert rows["models"] == ["model=triton://t:8001#model@1", "TRITON_SERVER_URL"]
        assert rows['models."model".input_names'] == ["text=text", "preset triton-grpc-proxy"]
        output = json.loads(
            runner.invoke(app, ["config", "--json"], env={**environ, "SHOAL_AS": "inference-server"}).stdout
        )
        assert output["preset"] == "inference-server"
        assert output["settings"]["port"] == {"value": 8686, "source": "preset inference-server"}

    def test_an_unknown_preset_is_a_usage_error(self) -> None:
        """The error lists the presets."""
        result = runner.invoke(app, ["serve", "--as", "nothing-like-it"])
        assert result.exit_code == 2
        assert result.stderr == (
            "error: --as: 'nothing-like-it' is not a preset: use one of triton-grpc-proxy, inference-server, "
            "triton-openai, ollama, tei, auto-batching-proxy, infinity\n"
        )

    def test_warnings_go_to_standard_error(self) -> None:
        """Standard output has only the requested data."""
        result = runner.invoke(app, ["config", "--json"], env={"SHOAL_MAX_BATCHSIZE": "3"})
        assert "warning: SHOAL_MAX_BATCHSIZE is not a setting" in result.stderr
        json.loads(result.stdout)


@pytest.mark.parametrize("command", ["shoal --version", "shoal config --json"])
def test_a_full_disk_behind_the_output_is_one_line(command: str) -> None:
    """The error says what failed, without a traceback now or as Python ends."""
    done = run_in_shell(f"{command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_a_current_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    """The error says what to do."""
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run_in_shell(f"cd {gone} && rmdir {gone} && shoal list")
    assert (done.returncode, done.stderr) == (1, "error: the current folder no longer exists: change to another one\n")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("shoal embed <&-", "error: standard input is empty: give texts as arguments, or pipe them in, one a line\n"),
        ("shoal config --json >&-", ""),
        ("shoal config 2>&- <&-", ""),
    ],
)
def test_closed_standard_streams(command: str, error: str) -> None:
    """They count as empty: Python has None for them, and their numbers would go to the next file."""
    done = run_in_shell(command)
    assert (done.returncode, done.stderr) == (1 if error else 0, error)


def test_subprocesses_have_the_standard_streams_that_were_closed() -> None:
    """A Triton or a process of `--workers` inherits the null device in their place."""
    child = "import os; [os.fstat(number) for number in range(3)]"
    code = "import subprocess, sys, shoal.cli; shoal.cli._open_missing_streams(); " + (
        f"sys.exit(subprocess.call([sys.executable, '-c', '{child}']))"
    )
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        assert run_in_shell(f'"{sys.executable}" -c "{code}" {closed}').returncode == 0, closed


def run_in_shell(command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", command], check=False, env=environ, capture_output=True, text=True)

"""Every error of a settings file and of the environment at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import load
from shoal.config.check import Problem, find_problems
from shoal.errors import AddressError, ConfigError

BAD = """\
prot = 80
port = "80"
api_key_file = "nothing.txt"

[models."small"]
backends = ["hf:a/b", "foo://x"]
poling = "mean"
prompts = { query = 3 }

[modles."big"]
x = 1
"""


def check_address(address: str) -> None:
    if "foo://" in address:
        raise AddressError(f"{address}: 'foo' is not a known scheme")


def find(file: Path | None, **environ: str) -> list[Problem]:
    return find_problems(file, environ, check_address)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shoal.toml"


def test_every_error_has_its_line_and_next_step(file: Path) -> None:
    """Unknown keys, wrong types, missing files, bad addresses, tables: each once, in the order of the file."""
    file.write_text(BAD)
    found = [(each.line, each.message) for each in find(file)]
    assert found == [
        (1, "prot is not a setting here: did you mean port?"),
        (2, "port: must be a whole number from 0 to 65535, not text in quotes"),
        (3, f"api_key_file: {file.parent / 'nothing.txt'} does not exist: create it or correct the path"),
        (6, "small=foo://x: 'foo' is not a known scheme"),
        (7, "poling is not a setting here: did you mean pooling?"),
        (8, "prompts: must be a table of text, got {'query': 3}"),
        (10, "modles is not a setting here: did you mean models?"),
    ]


def test_a_home_of_nobody_is_a_missing_file(file: Path) -> None:
    file.write_text('api_key_file = "~nosuch/x"\n')
    (problem,) = find(file)
    assert "~nosuch/x does not exist" in problem.message
    with pytest.raises(ConfigError, match=r"~nosuch/x .*no user of that name"):
        load({}, {}, file)


def test_variables_are_checked_too(file: Path) -> None:
    """Wrong values and addresses are errors that name the variable; an unknown name is a warning."""
    file.write_text("port = 1\n")
    found = find(file, SHOAL_STREAMS="x", SHOAL_MODELS="foo://x", SHOAL_AS="teii", SHOAL_PROT="1")
    assert {(each.place, each.is_error) for each in found} == {
        ("SHOAL_STREAMS", True), ("SHOAL_MODELS", True), ("SHOAL_AS", True), (str(file), False),
    }  # fmt: skip
    assert str(found[0]) == "SHOAL_STREAMS: error: must be a whole number of at least 0, got 'x'"
    assert "did you mean tei?" in str(found[2])
    assert str(found[-1]).endswith("warning: SHOAL_PROT is not a setting: did you mean SHOAL_PORT?")


def test_errors_between_settings_are_found_beside_others(file: Path) -> None:
    """A certificate without its key, and a public address without API keys."""
    cert = file.with_name("cert.pem")
    cert.touch()
    file.write_text(f'prot = 1\ntriton_cert_file = "{cert}"\n')
    assert [each.line for each in find(file)] == [1, None]
    file.write_text('host = "0.0.0.0"\n')
    assert "reachable from other machines" in find(file)[0].message


@pytest.mark.parametrize(("text", "line"), [("a = 1\nb = [\nc", 3), ("port == 1", 1)])
def test_broken_toml_is_one_error(file: Path, text: str, line: int) -> None:
    """The line is the parser's."""
    file.write_text(text)
    (found,) = find(file)
    assert found.message.startswith("not valid TOML")
    assert found.line == line


def test_a_missing_file_is_an_error_and_no_file_is_none(file: Path) -> None:
    """Without a file only the environment counts."""
    assert [str(each) for each in find(file)] == [f"{file}: error: cannot be read: No such file or directory"]
    assert find(None) == []


def test_a_preset_and_models_of_the_wrong_form(file: Path) -> None:
    """`as` and `models` are no settings, but are checked."""
    file.write_text('as = "olama"\nmodels = 3\n')
    assert [each.line for each in find(file)] == [1, 2]


def test_a_good_file_has_no_problem(file: Path) -> None:
    """Paths are relative to the file, and text that looks like keys is none."""
    file.with_name("keys").write_text("abc\n")
    file.with_name("keys").chmod(0o600)
    file.write_text('api_key_file = "keys"\n[models.m]\nbackends = ["fake:"]\nprompts = {a = """\nport = x\n"""}\n')
    assert find(file) == []

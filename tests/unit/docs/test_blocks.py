"""Every fenced block of README.md, docs/ and deploy/ parses; commands and Python are run by a test or say why not."""

from __future__ import annotations

import ast
import configparser
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator

import pytest
import typer
import yaml  # type: ignore[import-untyped]

from shoal.cli import app
from tests.unit.docs.blocks import BLOCKS, ROOT, Block

RUN_BY = {
    "docs/python.md": "tests/integration/test_python_api.py",
    "docs/api.md": "tests/surfaces/test_documented.py",
    "docs/batches.md": "tests/integration/test_documentation.py",
    "docs/extending.md": "tests/unit/test_extending.py",
    "docs/keys.md": "tests/integration/test_documentation.py",
    "docs/kserve.md": "tests/clients/test_tritonclient.py",
    "docs/tei.md": "tests/integration/test_documentation.py",
    "docs/tutorial.md": "tests/site/test_tutorial.py",
    "docs/migrate/auto-batching-proxy.md": "tests/integration/test_documentation.py",
    "docs/migrate/inference-server.md": "tests/integration/test_documentation.py",
    "docs/migrate/infinity.md": "tests/integration/test_documentation.py",
    "docs/migrate/litellm.md": "tests/integration/test_documentation.py",
    "docs/migrate/ollama.md": "tests/integration/test_documentation.py",
    "docs/migrate/triton-grpc-proxy.md": "tests/integration/test_documentation.py",
    "README.md": "tests/site/test_tutorial.py",
}
"""The test that runs the commands and the Python of a page, except blocks with a reason."""

EXECUTABLE = {"sh", "python", "js", "dockerfile"}
WORDS = re.compile(r"(?:\S*/)?shoal")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
SEPARATORS = set(";|&<>()")


def check_shell(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)


def check_json(text: str) -> None:
    """One value, or one a line."""
    try:
        json.loads(text)
    except ValueError:
        assert [json.loads(line) for line in text.splitlines()]


def check_ini(text: str) -> None:
    configparser.RawConfigParser(strict=False).read_string(text)


CHECKS: dict[str, Callable[[str], object]] = {
    "sh": check_shell,
    "python": lambda text: compile(text, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT),
    "json": check_json,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "ini": check_ini,
}
"""Languages of blocks with a check of their syntax. Blocks without a language are outputs, or drawings."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_syntax_is_right(block: Block) -> None:
    """A language without a check needs a reason."""
    if block.language in CHECKS:
        CHECKS[block.language](block.text)
    else:
        assert block.language == "" or block.reason


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language in EXECUTABLE], ids=str)
def test_it_is_run_or_says_why_not(block: Block) -> None:
    """By RUN_BY, or by `<!-- not run: REASON -->` before it, or `<!-- no block of this page is run: REASON -->`."""
    assert block.reason or block.page in RUN_BY


@pytest.mark.parametrize("page", RUN_BY)
def test_the_test_of_a_page_names_it(page: str) -> None:
    name = page.rpartition("/")[2]
    assert name in (ROOT / RUN_BY[page]).read_text()
    assert [each for each in BLOCKS if each.page == page and each.language in EXECUTABLE and not each.reason]


def commands() -> Iterator[tuple[str, list[str]]]:
    """(place, words after `shoal`) of each command line of a shell block."""
    for block in BLOCKS:
        if block.language != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = split(re.sub(r"(^|\s)#.*", "", line))
            for at, word in enumerate(words):
                before = words[at - 1] if at else ";"
                if WORDS.fullmatch(word) and (set(before) <= SEPARATORS or before == "--" or ASSIGNMENT.match(before)):
                    end = next((i for i in range(at, len(words)) if set(words[i]) <= SEPARATORS), len(words))
                    yield f"{block}: {line.strip()}", words[at + 1 : end]


def split(line: str) -> list[str]:
    """The words of a command line, with ;|&<> as words of their own; no word of a line with an open quote, which is
    part of a file that the block writes."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:
        return []


@pytest.mark.parametrize("words", [pytest.param(words, id=place) for place, words in commands()])
def test_the_options_exist(words: list[str]) -> None:
    """Each command line is one that `shoal` accepts; no command is run."""
    command = typer.main.get_command(app)
    if words[0].startswith("-"):  # the options of `shoal` itself act at once
        assert words[0] in {name for each in command.params for name in each.opts}
        return
    context = command.make_context("shoal", list(words))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        context = command.make_context(name, rest, parent=context)


def test_there_are_commands() -> None:
    assert len(list(commands())) > 70

"""Record docs/terminal.svg: commands of the tutorial in a real pseudo-terminal, drawn by rich.

    python docs/record.py [FOLDER OF shoal]

The default model has to be in the store already (`shoal pull`), as a download's progress is no good picture.
"""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 110
LINES = (
    "shoal serve 2>/dev/null &",
    "",  # waits until the server is ready
    'curl -si localhost:8080/v1/embeddings -H \'content-type: application/json\' -d \'{"model": "all-MiniLM-L6-v2",'
    ' "input": ["The food was delicious.", "The waiter sang."]}\' | grep -E "^(HTTP|x-shoal)"',
    "shoal bench http://localhost:8080 --clients 32 --duration 3 | grep batches",
    "shoal ps",
)
WAIT = "until curl -sf localhost:8080/health/ready >/dev/null; do sleep 0.2; done"
CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07")
"""Sequences other than colors."""


def script() -> str:
    """The commands, each after a prompt that shows it."""
    shown = [f"printf '\\033[1;32m$\\033[0m %s\\n' {quote(line)}\n{line}" if line else WAIT for line in LINES]
    return "\n".join(["cd $(mktemp -d)", *shown, "{ kill %1; wait; } 2>/dev/null"])


def quote(line: str) -> str:
    return "'" + line.replace("'", "'\\''") + "'"


def record() -> str:
    """Run the script in a terminal of WIDTH columns. Returns what a reader saw at the end."""
    received = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 65_536)
        received.extend(data)
        return data

    os.environ.update(COLUMNS=str(WIDTH), LINES="60", TERM="xterm-256color")
    code = pty.spawn(["bash", "-mc", f"stty cols {WIDTH}\n{script()}"], read, lambda _: b"")
    if code:
        sys.exit(f"the commands ended with {code}:\n{received.decode()}")
    return received.decode()


def draw(output: str, file: Path) -> None:
    """Write the picture, without the fonts that rich's template takes from another host."""
    lines = [CURSOR.sub("", line).rpartition("\r")[2] for line in re.split("\r*\n", output)]
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi("\n".join(line for line in lines if line.strip())), soft_wrap=False)
        svg = console.export_svg(title="shoal", unique_id="shoal")
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    if sys.argv[1:]:
        os.environ["PATH"] = f"{Path(sys.argv[1]).resolve()}:{os.environ['PATH']}"
    draw(record(), Path(__file__).with_name("terminal.svg"))

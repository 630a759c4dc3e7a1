"""Records what a run of the demo leaves on a terminal, as docs/run.svg. Run it after changing what is printed.

Needs ``pip install pyte``, a terminal emulator: progress bars are drawn and taken away again.
"""

import os
import pty
import re
import subprocess
import sys
import termios
from io import StringIO
from pathlib import Path
from shlex import join

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

PICTURE = Path(__file__).parent / "run.svg"
ROWS, COLUMNS = 100, 100
COMMAND = ["run", "demo", "-p", "What is the capital of France?", "--temp", "0"]


def recorded() -> pyte.Screen:
    """Return the terminal after the command has ended on it."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    command = [sys.executable, "-m", "strata", *COMMAND]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        try:
            while part := os.read(ours, 1 << 16):
                stream.feed(part)
        except OSError:  # how Linux says that the other side is closed
            os.close(ours)
    if process.returncode:
        raise SystemExit(f"strata ended with {process.returncode}")
    return screen


def lines(screen: pyte.Screen) -> list[Text]:
    """Return what is on the screen, colours included, without the path of the log: each machine has its own."""
    found = []
    for row in range(ROWS):
        line = Text()
        for column in range(COLUMNS):
            char = screen.buffer[row][column]
            line.append(char.data, Style(color=_colour(char.fg), bold=char.bold, italic=char.italics))
        line.rstrip()
        if not line.plain.startswith("log: "):
            found.append(line)
    while not found[-1].plain:
        found.pop()
    return found


def _colour(name: str) -> str | None:
    """Turn the emulator's name of a colour into Rich's: the 8 by name, of which one differs, the others in hex."""
    if name == "default":
        return None
    return (
        f"#{name}" if len(name) == 6 and all(c in "0123456789abcdef" for c in name) else name.replace("brown", "yellow")
    )


if __name__ == "__main__":
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ strata {join(COMMAND)}\n", "bold"))
    for line in lines(recorded()):
        console.print(line)
    svg = console.export_svg(title="strata", unique_id="strata")
    # No fonts from elsewhere: whoever looks at the picture has a monospaced one.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")

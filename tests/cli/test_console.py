"""Names, paths and logs are shown, not obeyed."""

import io

from rich.table import Table
from rich.text import Text

from strata.cli.console import PlainConsole

EVIL = "x\x1b[2J\x1b]0;title\x07\u202ey"


def test_nothing_that_is_printed_steers_the_terminal() -> None:
    table = Table.grid()
    table.add_row(EVIL, Text(EVIL))
    for renderable in (EVIL, Text(EVIL), table):
        console = PlainConsole(file=io.StringIO(), width=80)
        console.print(renderable, markup=False)
        text = console.file.getvalue()
        assert "x[2J]0;titley" in text
        assert text.replace("\n", "").isprintable()


def test_colours_and_progress_of_our_own_still_work() -> None:
    console = PlainConsole(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    console.print("[red]x[/]\ty")
    with console.status("working"):
        pass
    assert "\x1b[31mx" in console.file.getvalue()
    assert "\x1b[?25l" in console.file.getvalue()  # the cursor is hidden while it works

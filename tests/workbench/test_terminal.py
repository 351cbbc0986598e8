"""Control characters in names do not reach the terminal."""

import io

import pytest
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from deepcontrol.workbench.terminal import SafeConsole, printable

CLEAR = "a\x1b[2Jb\x9b31m\x07\udce9.png"


def test_printable_keeps_ordinary_text() -> None:
    text = "Straße 5 µs\t\n — 図.png"
    assert printable(text) == text
    assert printable(CLEAR) == "a\\x1b[2Jb\\x9b31m\\x07\\xe9.png"
    assert printable("\ud83d") == "\\ud83d"  # half of a pair, as in JSON
    printable(CLEAR).encode()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_text_becomes_a_control_sequence(is_terminal: bool) -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=is_terminal, color_system=None, width=80)
    console.print(escape(CLEAR), highlight=False)
    table = Table(escape(CLEAR))
    table.add_row(escape(CLEAR))
    console.print(table)
    with Progress(console=console, transient=True) as progress:
        progress.add_task(escape(CLEAR), total=1)
        progress.console.print(escape(CLEAR))
    text = file.getvalue()
    assert "a\\x1b[2Jb\\x9b31m" in text
    assert "\x1b[2J" not in text
    assert "\x9b" not in text
    assert "\x07" not in text
    text.encode()  # no surrogate is left


def test_names_with_colons_are_no_pictures() -> None:
    file = io.StringIO()
    SafeConsole(file=file, width=80).print("a:car:.png")
    assert file.getvalue() == "a:car:.png\n"

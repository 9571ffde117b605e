"""The only way from a verb to the terminal. The terminal interprets nothing that passes here.

Verbs print text of hosts, kernels and scripts: neither escape sequences nor Rich markup in it may
act. ``tests/test_architecture.py`` checks that no verb prints in another way.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, TextIO

from tmd.core.values.printable import ascii_json, only_ascii_json, printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDE = 10_000


def say(line: str = "", *, err: bool = False) -> None:
    """Print one line."""
    _write(printable(line), err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Print a text of several lines, such as all errors of a configuration."""
    _write(printable_lines(text), err)


def say_page(text: str) -> None:
    """Print a text of tmd's own in full, such as a manual page."""
    _write("\n".join(map(printable, text.rstrip("\n").split("\n"))), err=False)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON, for ``--json``."""
    import msgspec

    _write_json(msgspec.json.format(_encoded(value), indent=2).decode())


def say_json(value: Any) -> None:
    """Print ``value`` as JSON on one line, for streams."""
    _write_json(_encoded(value).decode())


def cell(text: str, style: str = "") -> Text:
    """Text for a table cell, without markup."""
    from rich.text import Text

    # Escaped here already, since Rich lays out the table by the lengths of its cells.
    return Text(_encodable(printable(text), sys.stdout), style=style)


def table(head: Sequence[str], rows: Iterable[Sequence[str]] = (), title: str = "") -> Table:
    """A table whose title and cells are plain text."""
    from rich import box
    from rich.table import Column, Table

    shown = cell(title, "bold") if title else None
    # Nothing is cut: names and codes are looked up and copied.
    columns = [Column(name, overflow="fold") for name in head]
    made = Table(*columns, title=shown, title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        add(made, *row)
    return made


def add(made: Table, *row: str, style: str | None = None) -> None:
    """Add a row of plain text."""
    made.add_row(*map(cell, row), style=style)


def console(*, markup: bool = False, stderr: bool = False) -> Console:
    """A Rich console that interprets nothing; ``markup``: except tmd's own markup."""
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        """Escapes all text from any source; Rich's own control codes are separate from it."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for text, style, control in super().render(renderable, options):
                shown = text if control else _encodable(printable_lines(text), self.file)
                yield Segment(shown, style, control)

    return Plain(markup=markup, stderr=stderr, emoji=False, highlight=False)


def draw(renderable: RenderableType) -> None:
    """Print one or several tables: into a file or a pipe each row in one line."""
    plain = console()
    if not plain.is_terminal and not os.environ.get("COLUMNS"):
        plain.width = WIDE
    plain.print(renderable)


def _encoded(value: Any) -> bytes:
    import json

    import msgspec

    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it, msgspec cannot
        return json.dumps(msgspec.to_builtins(value)).encode()


def _write_json(text: str) -> None:
    lacking = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
    _write(only_ascii_json(text) if lacking else ascii_json(text), err=False)


def _write(text: str, err: bool) -> None:
    stream: TextIO = sys.stderr if err else sys.stdout
    print(_encodable(text, stream), file=stream, flush=True)


def _encodable(text: str, stream: IO[str]) -> str:
    """``text``, in which the characters that the encoding of ``stream`` lacks are escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)

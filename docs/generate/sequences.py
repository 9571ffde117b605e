"""Sequence diagrams, drawn from the tables of the pages that describe them."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate.svg import Message, sequence

DOCS = Path(__file__).parents[1]
PAGES = {
    "planned-move": ("how/planned-move.md", "A planned move"),
    "kill": ("how/kill.md", "A worker is killed"),
}
ROW = re.compile(r"^\| \d+ \| ([^|]+?) → ([^|]+?) \| \*\*(.+?)\*\*.*\|$", re.MULTILINE)


def messages(page: str) -> list[Message]:
    """The rows of the page's table: the parties, and the words in bold."""
    return [Message(*found) for found in ROW.findall((DOCS / page).read_text())]


def picture(name: str) -> str:
    page, title = PAGES[name]
    return sequence(title, messages(page))

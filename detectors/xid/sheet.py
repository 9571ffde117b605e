"""Tables as data: CSV below lines ``# key: value``, among them ``source`` and ``as_of``."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, ValidationError, convert

from tmd.plugin import PluginError, in_words

Row = TypeVar("Row", bound=Struct)


class Sheet(Struct, frozen=True):
    """The metadata of a table."""

    source: str
    as_of: str

    @property
    def origin(self) -> str:
        """Source and date, for people."""
        return f"{self.source} ({self.as_of})"


def text(file: str | Path | None, shipped: str, what: str) -> tuple[list[str], str]:
    """The lines of ``file``, or of the file ``shipped`` in this folder; and its name.

    Raises:
        PluginError: the file cannot be read.
    """
    name = str(file) if file is not None else shipped
    try:
        place = Path(file) if file is not None else files(__package__) / shipped
        return place.read_text(encoding="utf-8").splitlines(), name
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"{what} table {name}: {in_words(error)}") from None


def rows(
    lines: Iterable[str], row: type[Row], key: str, what: str, name: str
) -> tuple[dict[int, Row], Sheet]:
    """Rows of type ``row`` by the number in column ``key``.

    Raises:
        PluginError: a row is invalid, or the table lacks source and date.
    """
    facts: dict[str, str] = {}
    data = []
    for line in lines:
        if line.startswith("#"):
            word, _, value = line[1:].partition(":")
            facts[word.strip()] = value.strip()
        else:
            data.append(line)
    found: dict[int, Row] = {}
    for values in csv.DictReader(data):
        try:
            given = {str(k): v for k, v in values.items() if v}
            read = convert(given, row, strict=False)
        except ValidationError as error:
            wrong = f"{what} {values.get(key)}: {in_words(error)}"
            raise PluginError(f"{what} table {name}: {wrong}") from None
        number = getattr(read, key)
        if number in found:
            raise PluginError(f"{what} table {name}: {what} {number} appears twice")
        found[number] = read
    if not (found and facts.get("source") and facts.get("as_of")):
        raise PluginError(
            f"{what} table {name}: it needs rows and the lines '# source: …' and '# as_of: …'"
        )
    return found, Sheet(facts["source"], facts["as_of"])

"""Tables as data: CSV below lines ``# key: value``, among them ``source`` and ``as_of``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct, ValidationError, convert

from tmd.plugin import PluginError, in_words

Row = TypeVar("Row", bound=Struct)


class Sheet(Struct, Generic[Row], frozen=True):
    """A table: its rows by number, and where they are from."""

    rows: Mapping[int, Row]
    source: str
    as_of: str

    @property
    def origin(self) -> str:
        """Source and date, for people."""
        return f"{self.source} ({self.as_of})"


def load(row: type[Row], what: str, file: str | Path | None = None) -> Sheet[Row]:
    """The table in ``file``, or the one in this folder.

    ``what``: what a row is about, ``XID``. In lower case it is the column of the number and the
    name of the file in this folder.

    Raises:
        PluginError: it cannot be read, a row is invalid, or it lacks source and date.
    """
    place = Path(file) if file is not None else files(__package__) / f"{what.lower()}.csv"
    name = str(file) if file is not None else place.name
    try:
        lines = place.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"{what} table {name}: {in_words(error)}") from None
    return parse(row, what, lines, name)


def parse(row: type[Row], what: str, lines: Iterable[str], name: str) -> Sheet[Row]:
    """See :func:`load`; ``name`` is for the errors."""
    key = what.lower()
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
    return Sheet(found, facts["source"], facts["as_of"])

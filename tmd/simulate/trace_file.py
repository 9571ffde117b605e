"""Reads a trace of one's own: CSV with a header, or a JSON object per line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import in_words, os_reason
from tmd.simulate.failures import FaultAssumptions
from tmd.simulate.values import HOUR, Fault, FaultScope, Warned


class FaultRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One fault of the file."""

    at_h: float
    """Hours since the start of the job."""
    place: int | None = None
    """The rank's host, or above the job's hosts a standby; instead of ``host``."""
    host: str = ""
    """Any name: the first names stand for the ranks, in the order in which they appear."""
    component: str = "unknown"
    scope: FaultScope = FaultScope.HOST
    repair_h: float | None = None
    """Hours until the host is back."""
    warned: Warned = Warned.NOT
    notice_h: float | None = None
    """Hours from the warning to the fault."""


def read(file: Path, hosts: int, standbys: int, assumptions: FaultAssumptions) -> tuple[Fault, ...]:
    """The faults of ``file``, in the order of their times.

    Raises:
        ConfigError: names the file, the line, what is wrong and the remedy.
    """
    try:
        text = file.read_text("utf-8-sig")  # spreadsheets begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        why = os_reason(error) if isinstance(error, OSError) else in_words(error)
        raise ConfigError(f"cannot read {file}: {why}") from None
    names: dict[str, int] = {}
    found = []
    for number, values in _lines(file, text):
        where = f"{file}, line {number}"
        row = _row(values, where)
        place = _place(row, names, hosts + standbys, where)
        repair_h = assumptions.repair_h if row.repair_h is None else row.repair_h
        notice_h = assumptions.notice_h if row.notice_h is None else row.notice_h
        found.append(
            Fault(
                at_s=row.at_h * HOUR,
                place=place,
                component=row.component,
                scope=row.scope,
                repair_s=repair_h * HOUR,
                warned=row.warned,
                notice_s=notice_h * HOUR,
            )
        )
    if not found:
        raise ConfigError(f"{file} has no fault: give lines with {_columns()}")
    return tuple(sorted(found, key=lambda f: f.at_s))


def _lines(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The values of each line, with its number."""
    if file.suffix in (".json", ".jsonl", ".ndjson"):
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield number, _object(line, f"{file}, line {number}")
        return
    rows = _cells(file, text)
    _, first = next(rows, (1, []))
    head = [name.strip() for name in first]
    if unknown := [name for name in head if name not in FaultRow.__struct_fields__]:
        raise ConfigError(
            f"{file}, line 1: there is no column '{unknown[0]}'; there are {_columns()}"
        )
    for number, cells in rows:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(head):
            raise ConfigError(f"{file}, line {number}: {len(cells)} values for {len(head)} columns")
        pairs = zip(head, (cell.strip() for cell in cells), strict=True)
        yield number, {name: cell for name, cell in pairs if cell}


def _cells(file: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row of CSV, with the number of its last line."""
    rows = csv.reader(text.splitlines())
    try:
        for cells in rows:
            yield rows.line_num, cells
    except csv.Error as error:
        raise ConfigError(
            f"{file}, line {rows.line_num}: {in_words(error)}; check that each quote is closed"
        ) from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where}: not JSON: {in_words(error)}; write one object on each line"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: no JSON object; write one object on each line")
    return values


def _row(values: dict[str, Any], where: str) -> FaultRow:
    try:
        row = msgspec.convert(values, FaultRow, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {in_words(error)}; there are {_columns()}") from None
    for name in ("at_h", "repair_h", "notice_h"):
        value = getattr(row, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {name} = {value}: give hours of at least 0")
    if row.scope is not FaultScope.HOST and row.warned is not Warned.NOT:
        raise ConfigError(f"{where}: only a fault that takes down a host can be warned of")
    return row


def _place(row: FaultRow, names: dict[str, int], places: int, where: str) -> int:
    if row.scope is FaultScope.JOB:
        return 0
    if (row.place is None) == (not row.host):
        raise ConfigError(f"{where}: give either 'place' or 'host'")
    place = names.setdefault(row.host, len(names)) if row.place is None else row.place
    if place < 0:
        raise ConfigError(f"{where}: place = {place}: places count from 0")
    if place >= places:
        what = f"{row.host} is host {place + 1} of the file" if row.host else f"place = {place}"
        raise ConfigError(
            f"{where}: {what}, but the job has {places} hosts with its standbys: give more with "
            "--hosts or --standbys"
        )
    return place


def _columns() -> str:
    return ", ".join(FaultRow.__struct_fields__)

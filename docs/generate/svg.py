"""Draws the pictures of the documentation as SVG: plain text in, plain text out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

FONT = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
INK, FAINT, PAPER = "#24292f", "#8c959f", "#ffffff"


def document(width: int, height: int, parts: Sequence[str], title: str) -> str:
    """A whole picture on a white ground, so that it can be read on dark pages, too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" style="{FONT}">'
    )
    arrow = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>'
    )
    ground = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", arrow, ground, *parts, "</svg>\n"])


def text(
    x: float, y: float, words: str, *, size: int = 12, at: str = "start", ink: str = INK
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{at}" fill="{ink}">'
        f"{escape(words)}</text>"
    )


def line(
    x1: float, y1: float, x2: float, y2: float, *, ink: str = INK, dash: str = "", tip: bool = False
) -> str:
    more = (f' stroke-dasharray="{dash}"' if dash else "") + (
        ' marker-end="url(#tip)"' if tip else ""
    )
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{ink}" fill="none"{more}/>'


def box(x: float, y: float, width: float, height: float, fill: str, ink: str = INK) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
        f'fill="{fill}" stroke="{ink}"/>'
    )


class Bar(NamedTuple):
    """One bar of a chart: a value with its range, and what it is."""

    label: str
    value: float
    low: float
    high: float
    fill: str
    shown: str


def bars(title: str, unit: str, rows: Sequence[Bar]) -> str:
    """A chart of horizontal bars from zero, with whiskers from the least to the greatest value."""
    left, right, step, top = 250, 130, 30, 50
    width = 760
    least = min(0.0, *(r.low for r in rows))
    most = max(r.high for r in rows)
    scale = (width - left - right) / (most - least)

    def place(value: float) -> float:
        return left + (value - least) * scale

    parts = [text(12, 24, title, size=14)]
    for number, row in enumerate(rows):
        y = top + number * step
        ends = sorted((place(0.0), place(row.value)))
        parts += [
            text(left - 10, y + 14, row.label, at="end"),
            box(ends[0], y, max(ends[1] - ends[0], 1.0), 20, row.fill, row.fill),
            line(place(row.low), y + 10, place(row.high), y + 10),
            text(place(row.high) + 8, y + 14, row.shown),
        ]
    height = top + len(rows) * step + 30
    parts += [
        line(place(0.0), top - 8, place(0.0), height - 26, ink=FAINT),
        text(12, height - 8, unit, size=11, ink=FAINT),
    ]
    return document(width, height, parts, title)


class Dots(NamedTuple):
    """One row of a chart of single measurements."""

    label: str
    values: Sequence[float]
    fill: str


def dots(title: str, unit: str, rows: Sequence[Dots]) -> str:
    """A chart with a dot for each value and a line at each median."""
    left, right, step, top, width = 270, 30, 30, 50, 780
    every = [0.0, *(value for row in rows for value in row.values)]
    scale = (width - left - right) / (max(every) - min(every))

    def place(value: float) -> float:
        return left + (value - min(every)) * scale

    height = top + len(rows) * step + 50
    parts = [text(12, 24, title, size=14)]
    for mark in range(math.ceil(min(every)), math.floor(max(every)) + 1):
        parts += [
            line(
                place(mark), top - 8, place(mark), height - 42, ink=FAINT, dash="2 3" * bool(mark)
            ),
            text(place(mark), height - 28, f"{mark} s", size=11, at="middle", ink=FAINT),
        ]
    for number, row in enumerate(rows):
        y = top + number * step + 10
        parts.append(text(left - 10, y + 4, row.label, at="end"))
        parts += [
            f'<circle cx="{place(value):.1f}" cy="{y}" r="4" fill="{row.fill}" opacity="0.5"/>'
            for value in row.values
        ]
        middle = round(place(statistics.median(row.values)), 1)
        parts.append(line(middle, y - 10, middle, y + 10))
    parts.append(text(12, height - 8, unit, size=11, ink=FAINT))
    return document(width, height, parts, title)


class Span(NamedTuple):
    """A part of a lane: from when to when, in seconds, its colour and its words."""

    lane: str
    begin: float
    end: float
    fill: str
    words: str = ""


def lanes(
    title: str, unit: str, panels: Sequence[tuple[str, Sequence[Span]]], mark: str, most: float
) -> str:
    """Panels one below the other, each with a lane for every name; ``mark`` labels time 0."""
    left, right, step, width = 80, 20, 24, 780
    least = min(span.begin for _, spans in panels for span in spans)
    scale = (width - left - right) / (most - least)

    def place(at: float) -> float:
        return left + (min(at, most) - least) * scale

    parts, y = [text(12, 24, title, size=14)], 56
    for label, spans in panels:
        top, names = y, sorted({span.lane for span in spans})
        parts.append(text(12, y, label))
        for number, name in enumerate(names):
            parts.append(text(left - 10, y + 24 + number * step, name, size=11, at="end"))
        for span in spans:
            x, high = place(span.begin), y + 10 + names.index(span.lane) * step
            parts.append(box(x, high, max(place(span.end) - x, 0.5), 18, span.fill, PAPER))
            if span.words and place(span.end) - x > 8 * len(span.words):
                middle = (x + place(span.end)) / 2
                parts.append(text(middle, high + 13, span.words, size=10, at="middle"))
        y += 10 + len(names) * step + 36
        parts.append(line(place(0), top + 6, place(0), y - 32, ink=INK, dash="4 3"))
    for fifth in range(math.ceil(5 * least), math.floor(5 * most) + 1):
        shown, ink = (f"{fifth / 5:g} s", FAINT) if fifth else (mark, INK)
        parts.append(text(place(fifth / 5), y - 18, shown, size=11, at="middle", ink=ink))
    parts.append(text(12, y + 6, unit, size=11, ink=FAINT))
    return document(width, y + 18, parts, title)


class Message(NamedTuple):
    """One line of a sequence: sender, receiver, and what happens."""

    sender: str
    receiver: str
    words: str


def sequence(title: str, messages: Sequence[Message]) -> str:
    """A sequence diagram: one column for each party, one row for each message."""
    parties = list(dict.fromkeys(p for m in messages for p in (m.sender, m.receiver)))
    gap, left, top, step = 190, 110, 60, 42
    width = left * 2 + gap * (len(parties) - 1)
    height = top + step * len(messages) + 30
    column = {party: left + gap * number for number, party in enumerate(parties)}
    parts = []
    for party, x in column.items():
        parts += [
            box(x - 75, 14, 150, 26, "#ddf4ff"),
            text(x, 32, party, at="middle"),
            line(x, 40, x, height - 10, ink=FAINT, dash="4 4"),
        ]
    for number, message in enumerate(messages, start=1):
        parts += _message(number, message, column, top + step * number, width)
    return document(width, height, parts, title)


def _message(
    number: int, message: Message, column: dict[str, int], y: float, width: int
) -> list[str]:
    start, end = column[message.sender], column[message.receiver]
    words = f"{number}. {message.words}"
    half = 3.4 * len(words)
    if start == end:
        middle = min(max(start, half + 4), width - half - 4)
        return [_label(middle, y - 6, words), box(start - 4, y, 8, 8, INK)]
    middle = min(max((start + end) / 2, half + 4), width - half - 4)
    return [_label(middle, y - 6, words), line(start, y, end, y, tip=True)]


def _label(x: float, y: float, words: str) -> str:
    wide = 6.7 * len(words) + 4
    ground = (
        f'<rect x="{x - wide / 2:g}" y="{y - 11:g}" width="{wide:g}" height="14" fill="white"/>'
    )
    return ground + text(x, y, words, size=11, at="middle")


class State(NamedTuple):
    """A state of a machine and where its box stands."""

    name: str
    x: int
    y: int


def machine(title: str, states: Sequence[State], edges: dict[tuple[str, str], str]) -> str:
    """Boxes and one arrow for each pair of states; a label names the rows of the table."""
    wide, high = 118, 32
    spots = {state.name: state for state in states}
    parts = []
    for (before, after), label in edges.items():
        parts += _edge(spots[before], spots[after], label, wide, high)
    for state in states:
        parts += [
            box(state.x - wide / 2, state.y - high / 2, wide, high, "#ddf4ff"),
            text(state.x, state.y + 4, state.name, at="middle"),
        ]
    width = max(s.x for s in states) + wide
    height = max(s.y for s in states) + 70
    return document(width, height, [text(12, 22, title, size=14), *parts], title)


def _edge(before: State, after: State, label: str, wide: int, high: int) -> list[str]:
    if before == after:
        x, y = before.x + wide / 2 - 8, before.y - high / 2
        loop = f"M{x - 24:g} {y:g}C{x - 24:g} {y - 34:g} {x:g} {y - 34:g} {x:g} {y:g}"
        path = f'<path d="{loop}" stroke="{INK}" fill="none" marker-end="url(#tip)"/>'
        return [path, text(x - 12, y - 30, label, size=10, at="middle")]
    dx, dy = after.x - before.x, after.y - before.y
    # Aside, so that the arrow back does not lie on the arrow there.
    length = (dx * dx + dy * dy) ** 0.5
    ox, oy = -dy / length * 7, dx / length * 7
    half = (wide / 2 + 2, high / 2 + 2)
    out, back = _exit(ox, oy, dx, dy, half), _exit(ox, oy, -dx, -dy, half)
    x1, y1 = before.x + ox + out * dx, before.y + oy + out * dy
    x2, y2 = after.x + ox - back * dx, after.y + oy - back * dy
    tx, ty = x1 + (x2 - x1) * 0.4 + ox * 0.9, y1 + (y2 - y1) * 0.4 + oy * 0.9 + 4
    return [line(x1, y1, x2, y2, tip=True), text(tx, ty, label, size=10, at="middle")]


def _exit(x: float, y: float, dx: float, dy: float, half: tuple[float, float]) -> float:
    """Where a line from (x, y), relative to the middle of a box, leaves it: part of (dx, dy)."""
    pairs = zip((x, y), (dx, dy), half, strict=True)
    return min((math.copysign(size, way) - at) / way for at, way, size in pairs if way)

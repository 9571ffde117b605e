"""Two plots as SVG, from numbers alone."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

ROW, LEFT, WIDE, TOP = 22, 230, 480, 28
COLOURS = ("#4e79a7", "#f28e2b", "#76b7b2", "#e15759", "#59a14f")
TICKS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
FLOOR_S = 0.01
"""Smaller values are drawn here: they cannot be distinguished from the noise of a step."""


def dots(values: Mapping[str, Sequence[float]]) -> str:
    """A row for each name and a dot for each value, in seconds on a logarithmic axis."""
    highest = max([value for row in values.values() for value in row] + [1.0])
    span = math.log10(highest / FLOOR_S)

    def place(value: float) -> float:
        return LEFT + WIDE * math.log10(max(value, FLOOR_S) / FLOOR_S) / span

    parts = list(_axis([t for t in TICKS if t <= highest], place, len(values)))
    for number, (name, row) in enumerate(values.items()):
        height = TOP + ROW * number + ROW / 2
        parts.append(_label(name, height))
        parts += [
            f'<circle cx="{place(v):.1f}" cy="{height:.1f}" r="4" fill="{COLOURS[0]}" '
            f'fill-opacity=".5"><title>{v:.3f} s</title></circle>'
            for v in row
        ]
    return _drawing(parts, len(values))


def bars(values: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """A row for each name: a bar with a part for each of ``names``, in seconds."""
    totals = [sum(max(v, 0.0) for v in row) for row in values.values()]
    highest = max([*totals, 0.01])

    def place(value: float) -> float:
        return LEFT + WIDE * value / highest

    steps = [highest * n / 4 for n in range(5)]
    parts = list(_axis(steps, place, len(values)))
    for number, (name, row) in enumerate(values.items()):
        height, begin = TOP + ROW * number, 0.0
        parts.append(_label(name, height + ROW / 2))
        for value, colour, part in zip(row, COLOURS, names, strict=False):
            length = max(value, 0.0)
            parts.append(
                f'<rect x="{place(begin):.1f}" y="{height + 4}" height="{ROW - 8}" '
                f'width="{WIDE * length / highest:.1f}" fill="{colour}">'
                f"<title>{part} {value:.3f} s</title></rect>"
            )
            begin += length
    legend = TOP + ROW * len(values) + 34
    for number, (colour, part) in enumerate(zip(COLOURS, names, strict=False)):
        across = LEFT + number * 90
        parts.append(
            f'<rect x="{across}" y="{legend - 9}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(f'<text x="{across + 14}" y="{legend}">{part}</text>')
    return _drawing(parts, len(values) + 1)


def _axis(ticks: Sequence[float], place: Callable[[float], float], rows: int) -> Iterable[str]:
    bottom = TOP + ROW * rows
    for tick in ticks:
        x = f"{place(tick):.1f}"
        yield f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{bottom + 14}" text-anchor="middle">{tick:.3g} s</text>'


def _label(text: str, height: float) -> str:
    label = html.escape(text)
    return f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{label}</text>'


def _drawing(parts: Iterable[str], rows: int) -> str:
    height = TOP + ROW * rows + 24
    size = f'width="{LEFT + WIDE + 40}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'

"""The lost hours of each setup as an SVG, a bar with a part for each cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from tmd.cli.common import check_folder
from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import os_reason
from tmd.simulate.tables import SHORT
from tmd.simulate.values import Cause, Outcome

ROW, LEFT, WIDE, TOP, LEGEND = 24, 110, 480, 34, 104
COLOURS = dict(
    zip(
        Cause,
        (
            *("#76b7b2", "#edc948", "#f28e2b", "#bab0ac", "#4e79a7", "#e15759"),
            *("#b07aa1", "#ff9da7", "#59a14f", "#9c755f", "#8cd17d"),
        ),
        strict=True,
    )
)
TICKS = 4


def check(file: Path) -> None:
    """Before a long run.

    Raises:
        ConfigError: ``file`` is no SVG by its name, or cannot be written.
    """
    if file.suffix != ".svg":
        raise ConfigError(f"--chart {file}: only SVG can be drawn, so give FILE.svg")
    check_folder("--chart", file)


def write(file: Path, found: Sequence[Outcome]) -> None:
    """Write the chart to ``file``.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.write_text(drawn(found))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {os_reason(error)}") from None


def drawn(found: Sequence[Outcome]) -> str:
    """The chart."""
    highest = max((one.hours - one.useful for one in found), default=0.0) or 1.0
    causes = [c for c in Cause if any(one.lost.get(c) for one in found)]
    legend = TOP + ROW * len(found) + 40
    height = legend + ROW * (1 + (len(causes) - 1) // 5)
    parts = [*_axis(highest, len(found)), *_legend(causes, legend)]
    for number, one in enumerate(found):
        parts += _bar(one, TOP + ROW * number, WIDE / highest)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDE + 60}" height="{height}" '
        'role="img" font-family="monospace" font-size="12">'
    )
    title = "Lost hours of the job by cause"
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    shown = f'<title>{title}</title>{ground}<text x="12" y="20">{title}</text>'
    return "\n".join([head, shown, *parts, "</svg>\n"])


def _bar(one: Outcome, top: int, scale: float) -> Iterator[str]:
    yield f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(one.setup.name)}</text>'
    begin = float(LEFT)
    for cause, colour in COLOURS.items():
        hours = one.lost.get(cause, 0.0)
        if hours:
            yield (
                f'<rect x="{begin:.1f}" y="{top + 3}" width="{hours * scale:.1f}" '
                f'height="{ROW - 6}" fill="{colour}"><title>{SHORT[cause]} {hours:.2f} h</title>'
                "</rect>"
            )
            begin += hours * scale
    yield f'<text x="{begin + 6:.1f}" y="{top + 15}">{one.goodput:.1%}</text>'


def _axis(highest: float, rows: int) -> Iterator[str]:
    bottom = TOP + ROW * rows
    for tick in range(TICKS + 1):
        x = LEFT + WIDE * tick / TICKS
        yield f'<line x1="{x:g}" x2="{x:g}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>'
        yield (
            f'<text x="{x:g}" y="{bottom + 14}" text-anchor="middle">'
            f"{highest * tick / TICKS:.3g} h</text>"
        )


def _legend(causes: Sequence[Cause], top: int) -> Iterator[str]:
    for number, cause in enumerate(causes):
        x, y = LEFT + number % 5 * LEGEND, top + number // 5 * ROW
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[cause]}"/>'
        yield f'<text x="{x + 14}" y="{y}">{SHORT[cause]}</text>'

"""Charts of what was measured, from ``bench/results``."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from docs.generate.figures import SIZES, Row, cpu, facts, of_size, result
from docs.generate.svg import Bar, Dots, Span, bars, dots, lanes

OURS, OTHERS, COPY = "#2da44e", "#8c959f", "#bf8700"
SHOWN = (-0.8, 2.0)
"""Seconds before and after a kill that its picture shows."""


def _bar(label: str, row: Row, fill: str) -> Bar:
    found = facts(row)
    numbers = [row.scale * found[key] for key in ("median", "min", "max")]
    return Bar(label, numbers[0], numbers[1], numbers[2], fill, f"{numbers[0]:.{row.digits}f}")


def chart_of_kills() -> str:
    """Downtime of a killed worker, beside what people use."""
    ours, theirs = ("downtime", ("tmd: downtime after kill -9",)), ("peers", ("tmd downtime_s",))
    return bars(
        "Downtime of kill -9 beyond one step, 10 M parameters, four ranks",
        "seconds; bar: median, line: least to greatest; two cores, CPU only; pairs side by side",
        [
            _bar(f"tmd ({cpu('downtime')})", Row("", *ours, digits=2), OURS),
            _bar(
                "torchrun, checkpoint each step",
                Row("", "downtime", ("torchrun: downtime after kill -9",), digits=2),
                OTHERS,
            ),
            _bar(f"tmd ({cpu('peers')})", Row("", *theirs, digits=2), OURS),
            _bar("torchft, tuned", Row("", "peers", ("downtime_s",), digits=2), OTHERS),
        ],
    )


def chart_of_pauses() -> str:
    """Every planned move as a dot."""
    rows = []
    for size in SIZES:
        for way, words, fill in (("shadow", "live shadow", OURS), ("copy", "stop-and-copy", COPY)):
            runs = result(of_size("pause", way, size))["runs"][f"{way} {size}"]
            step = statistics.median(run["median_step_s"] for run in runs)
            label = f"{words}, {size}, step {step:.2f} s"
            rows.append(Dots(label, [run["pause_s"] for run in runs], fill))
    return dots(
        "Pause of a planned move beyond one step",
        f"seconds; dot: one move, line: median; two cores ({cpu('pause')}), CPU only",
        rows,
    )


def life_of_a_broken_step() -> str:
    """One kill in the middle of a step, with the step repeated and with it finished."""
    panels = [
        (words, _life(way))
        for way, words in (
            ("repeat", "the step is repeated: [shadow] finish_steps = false"),
            ("hot", "the step goes on: its standby takes the place of rank 3"),
        )
    ]
    return lanes(
        "kill -9 of rank 3, which a hot standby follows, at 10 M parameters",
        "green: a step; red: a discarded one; pale: wait for the vote, and optimizer; "
        f"two cores ({cpu('hot')}), CPU only",
        panels,
        "kill",
        SHOWN[1],
    )


def _life(way: str) -> list[Span]:
    found = result("hot")
    # The kills of a run come later and later in a step: this is the middle one.
    kill = found["runs"][f"{way} 10M"][found["settings"]["events"] // 2]
    earliest, latest = SHOWN
    spans = []
    for rank, step, counts, began, computed, ended in kill["life"]:
        if ended > earliest and began < latest:
            fill, pale = (OURS, "#aceebb") if counts else ("#cf222e", "#ffcecb")
            lane, begin = f"rank {rank}", max(began, earliest)
            spans += [
                Span(lane, begin, max(computed, begin), fill, str(step)),
                Span(lane, max(computed, begin), ended, pale),
            ]
    return spans


PICTURES: dict[str, Callable[[], str]] = {
    "kills": chart_of_kills,
    "pauses": chart_of_pauses,
    "broken-step": life_of_a_broken_step,
}

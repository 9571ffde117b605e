"""The table of what :mod:`bench.gpu` has measured."""

from __future__ import annotations

from typing import Any

from bench import measure


def downtimes(found: dict[str, Any], cause: str) -> dict[str, float]:
    """Summary of the seconds that losses of one ``cause`` cost."""
    return _summary(found, cause, "downtime_s")


def steps(found: dict[str, Any], cause: str) -> dict[str, float]:
    """Summary of the median steps before losses of one ``cause``."""
    return _summary(found, cause, "median_step_s")


def _summary(found: dict[str, Any], cause: str, key: str) -> dict[str, float]:
    events = found["runs"]["losses"]["events"]
    return measure.summary(event[key] for event in events if event["cause"] == cause)


def table(found: dict[str, Any]) -> str:
    """Its figures, and its losses by kind."""
    figures = found["figures"]
    rows = (
        ("1 rank: step through tmd / on NCCL, times", figures["ratio 1"]["ratio"]),
        ("4 ranks: the same", figures["ratio 4"]["ratio"]),
        ("drain: pause, s", figures["moves"]),
        ("kill -9: downtime, s", downtimes(found, "trainer.exited")),
        ("SIGSTOP: downtime, s", downtimes(found, "trainer.stalled")),
    )
    lines = ["| what | median | least | greatest | n |", "|---|---|---|---|---|"]
    for label, each in rows:
        numbers = " | ".join(f"{each[key]:.3f}" for key in ("median", "min", "max"))
        lines.append(f"| {label} | {numbers} | {each['n']} |")
    return "\n".join(lines)

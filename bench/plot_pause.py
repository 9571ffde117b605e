"""Draw ``docs/pause.svg`` from what ``bench.pause`` has measured: a dot per move, by way and size.

Needs matplotlib (``pip install -c constraints.txt ".[plot]"``).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "pause"  # the same picture from the same figures, byte for byte
from matplotlib import pyplot as plt  # noqa: E402

from bench.measure import RESULTS  # noqa: E402

TARGET = Path("docs/pause.svg")
SIZES = ("pause.json", "pause_60M.json", "pause_140M.json", "pause_200M.json")
FILES = (*SIZES, "restart.json", "restart_200M.json")
"""One run each: a size takes half an hour, and large ones more memory than others leave."""
COLOURS = {"shadow": "tab:green", "copy": "tab:red", "torchrun": "tab:gray"}
LABELS = {
    "shadow": "live shadow",
    "copy": "stop-and-copy",
    "torchrun": "torchrun, from a checkpoint",
}
LINEAR_MS = 100
"""Up to here the axis is linear, so that pauses below the noise of a step can be seen."""


def measured() -> dict[str, list[dict[str, Any]]]:
    """All events by way and size; the ways side by side at each size."""
    every: dict[str, list[dict[str, Any]]] = {}
    for name in FILES:
        every |= json.loads((RESULTS / name).read_text())["runs"]
    shown = [name for name, found in every.items() if found and found[0]["pause_s"] is not None]
    order = sorted(
        shown, key=lambda n: (int(n.split()[1].rstrip("M")), [*LABELS].index(n.split()[0]))
    )
    return {name: every[name] for name in order}


def main() -> None:
    runs = measured()
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.55 * len(runs)))
    for row, (name, events) in enumerate(runs.items()):
        way, size = name.split()
        pauses = [1000 * e["pause_s"] for e in events]
        step = 1000 * statistics.median(e["median_step_s"] for e in events)
        axes.plot(pauses, [row] * len(pauses), "o", alpha=0.5, color=COLOURS[way])
        axes.plot([statistics.median(pauses)] * 2, [row - 0.3, row + 0.3], color="black")
        axes.text(
            1.01,
            row,
            f"{LABELS[way]}, {size}\nstep {step:.0f} ms, n = {len(pauses)}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
        )
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=LINEAR_MS)
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(runs) - 0.4)
    axes.set_xlabel("pause beyond one step, ms (line: median)")
    figure.savefig(TARGET, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()

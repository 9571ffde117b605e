"""The committed pictures: ``python -m docs.generate.pictures`` draws all but the demo's anew.

A test compares each with what its source says today. :mod:`docs.generate.terminal` draws the demo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from docs.generate import charts, machines, sequences

FOLDER = Path(__file__).parents[1] / "pictures"
PICTURES: dict[str, Callable[[], str]] = {
    "plan": machines.plan_picture,
    "worker": machines.worker_picture,
    "generation": machines.generation_picture,
    "step": machines.step_picture,
    **{name: partial(sequences.picture, name) for name in sequences.PAGES},
    **charts.PICTURES,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()

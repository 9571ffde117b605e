"""Puts back the state of torchmetrics' metrics before a validation is run again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

PLAIN = (Tensor, bool, int, float, str, type(None))
RESULTS = ("_cache", "_computed", "_forward_cache")
"""Attributes of a metric that may hold results of any type."""


class RepeatedMetrics:
    """Puts the metrics of a module back before a validation is run again, in which they would count
    the broken one, too. A broken validation may come to its end, and only then lose its vote."""

    def __init__(self) -> None:
        self._at: object = None
        self._before: list[tuple[Metric, dict[str, Any]]] = []

    def begin(self, at: object, module: nn.Module) -> None:
        """A validation begins. ``at`` is the same if it is one that is run again."""
        if at == self._at:
            for metric, states in self._before:
                vars(metric).update(states)
        metrics = (each for each in module.modules() if isinstance(each, Metric))
        self._at, self._before = at, [(each, _states(each)) for each in metrics]

    def forget(self) -> None:
        """The validation counts."""
        self._before = []


def _states(metric: Metric) -> dict[str, Any]:
    """Copies of the states of a metric, and of the plain values beside them: cached results,
    counts, and whether the states are those of all ranks."""
    return {
        name: _copied(value)
        for name, value in vars(metric).items()
        if name in (*metric._defaults, *RESULTS) or isinstance(value, PLAIN)
    }


def _copied(value: Any) -> Any:
    """Without the graph that computed it, which a metric of a training step may hold."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return value

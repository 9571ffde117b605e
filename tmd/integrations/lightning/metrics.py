"""What the metrics of a module have added up in a validation that is run again."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

OF_A_SUM = (
    *("_update_count", "_computed", "_forward_cache"),
    *("_cache", "_is_synced", "_to_sync", "_should_unsync", "_enable_grad"),
)
"""Attributes of a metric besides its states: what it has computed from them, and whether they are
those of all ranks."""


class MetricSums:
    """Copies of the states of all metrics of a module."""

    def __init__(self, module: nn.Module) -> None:
        metrics = [each for each in module.modules() if isinstance(each, Metric)]
        self._kept = [(each, _sums(each)) for each in metrics]

    def put_back(self) -> None:
        """Give all metrics the copies. May be called once."""
        for metric, sums in self._kept:
            vars(metric).update(sums)


def _sums(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, *OF_A_SUM)
    return {name: _copied(vars(metric)[name]) for name in names if name in vars(metric)}


def _copied(value: Any) -> Any:
    """Without the graph that computed it, which a metric of a training step may hold."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_copied(each) for each in value]
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return value

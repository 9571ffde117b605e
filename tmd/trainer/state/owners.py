"""Which optimizer owns which parameter.

A script may change this while it trains: fine-tuning adds a group when it unfreezes a layer, and
block-wise training puts other parameters in the place of those of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

from tmd.trainer.state.optimizer_state import params_of


class Owners:
    """The owners of the parameters of the registered optimizers, by identity."""

    def __init__(self) -> None:
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._divided: Sequence[torch.optim.Optimizer] = ()
        self._groups: Sequence[Sequence[Tensor]] = ()
        self._found: dict[int, torch.optim.Optimizer] = {}

    def renew(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        divided: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Use ``optimizers`` from now on. ``divided``: those that are divided among ranks, of which
        ``optimizers`` has this rank's parts."""
        self._optimizers, self._divided = tuple(optimizers), tuple(divided)
        self._find()

    @property
    def by_param(self) -> dict[int, torch.optim.Optimizer]:
        """Optimizers by the identity of their parameters. The dictionary is replaced after a
        change; any thread may read it. A group that has got more parameters is noticed here."""
        if list(map(len, self._groups)) != list(map(len, self._now())):
            self._find()
        return self._found

    @property
    def owned(self) -> set[int]:
        """Identities of all parameters of optimizers, also of parts that other ranks hold."""
        return {id(p) for each in (*self._optimizers, *self._divided) for p in params_of(each)}

    def look(self) -> None:
        """Between two steps: notice a group that has got other parameters."""
        now = self._now()
        if len(now) != len(self._groups) or not all(map(_same, self._groups, now)):
            self._find()

    def _now(self) -> list[Sequence[Tensor]]:
        return [
            group["params"]
            for each in (*self._optimizers, *self._divided)
            for group in each.param_groups
        ]

    def _find(self) -> None:
        groups = [tuple(params) for params in self._now()]
        self._found = {id(p): each for each in self._optimizers for p in params_of(each)}
        self._groups = groups


def _same(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))

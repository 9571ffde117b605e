"""Objects that the parts of a worker share once its script has registered the state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tmd.core.values.limits import ShadowLimits
from tmd.fabric import Fabric
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units
from tmd.trainer.state.window import Window
from tmd.trainer.state_transfer.fit import Fit
from tmd.trainer.state_transfer.rank_state import RankState
from tmd.trainer.state_transfer.transfer import StateTransfer
from tmd.trainer.state_transfer.verification import StateVerification


@dataclass(frozen=True)
class RankContext:
    """Belongs to one registration; its parts live until the process ends."""

    fabric: Fabric
    limits: ShadowLimits
    units: Units
    window: Window
    state: RankState
    fit: Fit
    verification: StateVerification
    transfer: StateTransfer

    @classmethod
    def of(
        cls,
        fabric: Fabric,
        limits: ShadowLimits,
        registry: Registry,
        wrapped: list[nn.Module],
        local: LocalState,
        *,
        several: bool = False,
    ) -> RankContext:
        """``wrapped``: the registered DDP modules; ``several``: the script can build other roles,
        too."""
        units = Units(registry, local.start)
        state = RankState(fabric, registry, units, wrapped, local)
        fit, verification = Fit(fabric, state, several=several), StateVerification()
        transfer = StateTransfer(fabric, state, fit, verification)
        window = Window(lambda: units.params, local.start)
        return cls(fabric, limits, units, window, state, fit, verification, transfer)

"""All kinds of fault."""

from __future__ import annotations

from tmd.campaign.faults import control, daemons, detectors, host, network, operators, process
from tmd.campaign.kind import FaultKind

KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for module in (process, host, network, control, detectors, daemons, operators)
    for kind in module.KINDS
}

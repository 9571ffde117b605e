"""All kinds of fault, by what they hit: processes, hosts, network, detectors, control plane.

Each module has the kinds of one target in its ``KINDS``. :mod:`tmd.campaign.campaign` looks those
of a scenario up here.
"""

from __future__ import annotations

from tmd.campaign.faults import control, daemons, detectors, host, network, operators, process
from tmd.campaign.kind import FaultKind

KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for module in (process, host, network, control, detectors, daemons, operators)
    for kind in module.KINDS
}

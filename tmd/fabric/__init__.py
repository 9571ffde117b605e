"""Process groups whose members can be replaced: the ``torch.distributed`` backend ``tmd``.

Start reading at :mod:`tmd.fabric.fabric`.
"""

from tmd.fabric.backend import install, register
from tmd.fabric.counters import LinkCounters
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.fabric import Fabric
from tmd.fabric.group import Group
from tmd.fabric.grouping import GroupTable, GroupView, packed, packed_row, unpacked
from tmd.fabric.link import Link
from tmd.fabric.rank_remap import look_ahead
from tmd.fabric.sandbox import Neutral, OutputSource
from tmd.fabric.tap import Tap
from tmd.fabric.transfer import PeerLost

__all__ = [
    "EpochView",
    "Fabric",
    "Group",
    "GroupTable",
    "GroupView",
    "Link",
    "LinkCounters",
    "Neutral",
    "OutputSource",
    "PeerLost",
    "Tap",
    "install",
    "look_ahead",
    "packed",
    "packed_row",
    "register",
    "unpacked",
]

register()

"""Process groups whose members can be replaced: the ``torch.distributed`` backend ``tmd``.

Start reading at :mod:`tmd.fabric.fabric`. ``collectives`` has the algorithms, ``generations`` the
inner groups such as those of NCCL. The trainer owns a :class:`Fabric` and turns it to another epoch
or rank. It imports :mod:`tmd.core` and :mod:`tmd.torch_private`, never the trainer.
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

"""Updates torch's cached rank and mesh coordinates after a rank change.

torch asks a group for its rank each time, but caches other values: the global ranks of a group, the
coordinates in a ``DeviceMesh``, FSDP2's ranks in its two groups, and values computed from them in
DTensor's caches and as constants in compiled code. Coordinates become properties that ask the
group; the rest is corrected at each change.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from tmd.fabric.grouping import Participant
from tmd.torch_private.c10d import group_ranks
from tmd.torch_private.meshes import PLACES, forget_compiled, forget_shards, spec_class

ASKED = "_tmd_place"
"""Attribute of a mesh: the groups last asked for its coordinates, and the result."""


class Scan:
    """What is known of the meshes and DTensors of this process."""

    def __init__(self, all_even: Callable[[], bool]) -> None:
        """``all_even``: looks whether all parts of each DTensor have one shape."""
        self.meshes = False
        """Whether there is any."""
        self.leave_out = False
        """Whether one has no coordinates for a rank that this process held."""
        self._all_even = all_even
        self._even = True
        self._ran = -1
        """Operations that had run by the last look. Every step has some, so equality means no
        newer DTensors."""

    def parts_differ(self, ran: int) -> bool:
        """Whether another rank's part of a DTensor may have another shape, or not exist."""
        if spec_class() is None:
            return False
        if not self.leave_out and self._ran != ran:
            self._even, self._ran = self._all_even(), ran
        return self.leave_out or not self._even


def teach() -> None:
    """Make objects that cache their rank in a group or mesh ask for it from now on.

    Idempotent. Classes whose module is not imported yet are left to a later call.
    """
    for (module, kind, attribute), ask in zip(PLACES, ASKING, strict=True):
        loaded = sys.modules.get(module)
        if loaded is not None and attribute not in vars(getattr(loaded, kind)):
            setattr(getattr(loaded, kind), attribute, property(ask, _ignore_set))


def look_ahead(ran: int, scan: Scan | None = None) -> None:
    """When idle, compute in advance what :func:`turn` would compute while others wait."""
    scan = scan or _SCAN
    if scan.meshes:
        scan.parts_differ(ran)


def turn(groups: Iterable[Participant], *, moved: bool, ran: int, scan: Scan | None = None) -> None:
    """Make torch see ``groups`` as they are now; ``moved``: the rank has changed, too.

    ``ran``: how many operations this process has run. Call it in the main thread while none runs.
    If the process has moved and uses DTensors, all its objects are scanned, which takes tens of
    milliseconds, unless nothing has run since the last scan.
    """
    teach()
    scan = scan or _SCAN
    known = group_ranks()
    for group in groups:
        if isinstance(group, dist.ProcessGroup) and group in known:
            known[group] = {rank: place for place, rank in enumerate(group.view.ranks)}
    if moved and scan.meshes:
        forget_compiled()
        if scan.parts_differ(ran):
            # If all parts are alike the caches stay: refilling them takes as long as many steps.
            forget_shards()


def _ignore_set(mesh: Any, place: object) -> None:
    """torch sets the value that is now computed; only the existence of the mesh matters."""
    _SCAN.meshes = True


def _place(mesh: Any) -> tuple[int, ...] | None:
    """Coordinates of this process in ``mesh``; ``None`` if it has none."""
    rank = dist.get_rank()
    asked = vars(mesh).get(ASKED)
    if asked is None or asked[0] != rank:
        try:
            found = (mesh.mesh == rank).nonzero().tolist()
        except RuntimeError:  # a part of a mesh that does not have this rank
            found = []
        asked = (rank, tuple(found[0]) if found else None)
        setattr(mesh, ASKED, asked)
    place: tuple[int, ...] | None = asked[1]
    _SCAN.leave_out |= place is None
    return place


def _rank(_mesh: Any) -> int:
    return dist.get_rank()


def _shard_place(info: Any) -> int:
    return int(info.shard_process_group.rank())


def _replica_place(info: Any) -> int:
    return int(info.replicate_process_group.rank())


ASKING: tuple[Callable[[Any], Any], ...] = (_rank, _place, _shard_place, _replica_place)
"""How to compute each of :data:`tmd.torch_private.meshes.PLACES` anew."""


def _all_even() -> bool:
    kind = spec_class()
    if gc.get_freeze_count():
        gc.unfreeze()  # frozen objects are not found
    # By type(): some objects answer isinstance() with side effects.
    return all(_is_even(each) for each in gc.get_objects() if type(each) is kind)


def _is_even(spec: Any) -> bool:
    """Whether all parts of a tensor have one shape, as far as can be determined."""
    parts: dict[int, int] = {}
    for dim, placement in enumerate(spec.placements):
        if placement.is_replicate() or placement.is_partial():
            continue
        cut = getattr(placement, "dim", None)
        if cut is None:
            return False
        parts[cut] = parts.get(cut, 1) * spec.mesh.size(dim)
    if math.prod(parts.values()) == 1:
        return True
    shape = () if spec.tensor_meta is None else spec.tensor_meta.shape
    return all(
        cut < len(shape) and isinstance(shape[cut], int) and shape[cut] % into == 0
        for cut, into in parts.items()
    )


_SCAN = Scan(_all_even)

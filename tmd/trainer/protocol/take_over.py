"""One take-over of a rank by this worker: from its directive until the state is in place."""

from __future__ import annotations

import xxhash
from msgspec import Struct, msgpack

from tmd.core.planning.directives import Arm, Directive, Prepare, Sync
from tmd.core.values.model import Membership
from tmd.fabric import Link
from tmd.trainer.protocol.offers import StateHeader


class Takeover(Struct):
    """The joiner's progress, until its directive changes or the state is in place."""

    directive: Prepare | Sync
    link: Link | None = None
    header: StateHeader | None = None
    started: float = 0.0
    """Monotonic time at which the source connected."""
    timings: dict[str, float] = {}

    @property
    def plan(self) -> str:
        return self.directive.plan

    @property
    def rank(self) -> int:
        return self.directive.rank

    @property
    def membership(self) -> Membership:
        return self.directive.membership

    @property
    def step(self) -> int:
        """The step at whose start the received state is."""
        assert self.header is not None
        return self.header.step

    def wanted(self, directive: Directive | None) -> bool:
        """Whether the latest ``directive`` still demands exactly this take-over."""
        return directive == self.directive


def state_purpose(directive: Arm | Prepare | Sync, rank: int) -> str:
    """Name of the stream on which the state of ``rank`` travels.

    A plan may be rewritten in a recovery. A joiner that is still busy with the earlier directive
    must not take the call of the source that carries out the later one, which calls only once.
    """
    purpose = f"state/{directive.plan}/{rank}"
    if not isinstance(directive, Sync):
        return purpose
    attempt = (directive.membership.epoch, directive.resume, directive.back, directive.moves)
    return f"{purpose}/{xxhash.xxh3_64_hexdigest(msgpack.encode(attempt))}"

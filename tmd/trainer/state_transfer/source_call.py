"""Waits for the source to call, and notices one that refuses links of this worker.

The leader gives no rank to a worker of another release. A leader of an earlier release does not
know that: the source could not reach this worker, and the job would stand until a deadline of the
leader.
"""

from __future__ import annotations

from collections.abc import Callable

from tmd.core.planning.directives import Prepare, Sync
from tmd.core.values.errors import LinkTimeout, StateMismatch
from tmd.core.values.model import Member
from tmd.fabric import Fabric, Link

PATIENCE_S = 1.5
CALL_S = 1.0
ENOUGH = 2
"""Refusals in a row: a source that ends in a handshake may look like one that refuses, once."""


def await_call(
    fabric: Fabric,
    purpose: str,
    source: Member | None,
    cancelled: Callable[[], bool],
    patience_s: float = PATIENCE_S,
) -> Link:
    """The link on which the source calls. ``source``: asked after ``patience_s`` whether it
    refuses this worker; not if ``None``.

    Raises:
        LinkError: the wait was cancelled.
        StateMismatch: the source refuses links of this worker.
    """
    if source is None:
        return fabric.accept(purpose, cancel=cancelled)
    refusals = 0
    while True:
        try:
            return fabric.accept(purpose, timeout=patience_s, cancel=cancelled)
        except LinkTimeout:
            why = fabric.refusal(source, timeout=CALL_S)
        refusals = refusals + 1 if why else 0
        if refusals >= ENOUGH:
            raise StateMismatch(f"no state can be had: {why}")


def source_of(directive: Prepare | Sync) -> Member | None:
    """The source that calls after ``directive``; ``None`` if this worker has called it before."""
    if isinstance(directive, Prepare):
        return None
    return next(m.source for m in directive.moves if m.rank == directive.rank)

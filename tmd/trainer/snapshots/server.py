"""Serves this host's snapshot store: ranks bring copies, and joiners fetch them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.model import Member
from tmd.fabric import Fabric, Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.copies import StateCopy
from tmd.trainer.protocol.frames import SNAPSHOTS, Bring, Dropped, Envelope, Fetch, Opening, Stored
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.snapshots.store import SnapshotStore
from tmd.trainer.snapshots.writer import receive_copy, send_copy
from tmd.trainer.state_transfer.obstacle import Rebuild

CONNECT_S = 10.0
SILENCE_S = 30.0
"""Longest time without a byte of a copy."""
ENDING_S = 2.0
DAMAGED = "other bytes arrived than were sent"

log = logging.getLogger("tmd.trainer")


class SnapshotServer:
    """Owns a thread that accepts links, and one for each link."""

    def __init__(
        self, fabric: Fabric, store: SnapshotStore, offer: Callable[[StateCopy], Offer]
    ) -> None:
        """``offer``: returns a copy's offer to a joiner."""
        self._fabric = fabric
        self._store = store
        self._offer = offer
        self._callers: dict[Link, threading.Thread] = {}
        threading.Thread(target=self._let_in, name="tmd-snapshots-door", daemon=True).start()

    def close(self) -> None:
        """Stop the threads, since none may be inside torch when the process ends."""
        for link, thread in list(self._callers.items()):
            link.close()
            thread.join(ENDING_S)

    def _let_in(self) -> None:
        while True:
            try:
                link = self._fabric.accept(SNAPSHOTS)
            except LinkError:
                return
            thread = threading.Thread(
                target=self._serve, args=(link,), name="tmd-snapshots-in", daemon=True
            )
            self._callers[link] = thread
            thread.start()

    def _serve(self, link: Link) -> None:
        try:
            while True:
                # A keeper may receive nothing between two snapshots, which may be many steps.
                link.patience(0)
                frame, _ = frames.receive(link)
                link.patience(SILENCE_S)
                match frame:
                    case Bring():
                        self._take_in(link, frame)
                    case Fetch():
                        self._give_out(link, frame)
                    case other:
                        raise LinkError(f"{link.peer} began with {type(other).__name__}")
        except LinkError as error:
            log.debug("the link for copies with %s has ended: %s", link.peer, error)
        except Exception as error:
            # No error of a copy may reach training.
            log.warning("no longer storing copies of %s: %s", link.peer, error)
        finally:
            link.close()
            self._callers.pop(link, None)

    def _take_in(self, link: Link, bring: Bring) -> None:
        copy = receive_copy(link, bring)
        if copy is None:
            refusal = DAMAGED
        else:
            refusal = "" if self._store.put(copy) else "it is of a batches() call that has ended"
        frames.send(link, Envelope(Stored(refusal)))

    def _give_out(self, link: Link, fetch: Fetch) -> None:
        copy = self._store.get(fetch.rank, fetch.step)
        if copy is None:
            reason = f"no copy of rank {fetch.rank} at step {fetch.step} is here"
            frames.send(link, Envelope(Dropped(reason)))
            return
        frames.send(link, Envelope(Opening(self._offer(copy))))
        send_copy(link, copy)


def call_on(fabric: Fabric, keeper: Member) -> Link:
    """A link to the snapshot server of ``keeper``. Raises LinkError."""
    link = fabric.connect(keeper, SNAPSHOTS, timeout=CONNECT_S)
    link.patience(SILENCE_S)
    return link


def fetched(
    link: Link, rank: int, step: int, refusal: Callable[[Offer], str | Rebuild]
) -> StateCopy | Rebuild:
    """The copy of ``rank`` at ``step`` from the keeper at the other end.

    A ``Rebuild``: the model must be built for that rank first.

    Raises:
        LinkError: the keeper is gone, or has no such copy.
        StateMismatch: it does not fit here (``refusal``), or other bytes arrived than were sent.
    """
    frames.send(link, Envelope(Fetch(rank, step)))
    opening, _ = frames.receive(link)
    if not isinstance(opening, Opening):
        why = opening.reason if isinstance(opening, Dropped) else type(opening).__name__
        raise LinkError(f"{link.peer}: {why}")
    misfit = refusal(opening.offer)
    if isinstance(misfit, Rebuild):
        return misfit
    if misfit:
        raise StateMismatch(misfit)
    bring, _ = frames.receive(link)
    if not isinstance(bring, Bring) or (bring.rank, bring.step) != (rank, step):
        raise LinkError(f"{link.peer} did not send the copy of rank {rank} at step {step}")
    copy = receive_copy(link, bring)
    if copy is None:
        raise StateMismatch(f"{DAMAGED}: memory or network of one side corrupts data")
    return copy

"""Carrying the state of a rank between two workers, and answering what a state looks like.

The main thread sends and receives; a thread of its own answers questions about the layout, from
bytes that were made when the objects were registered, so that a joiner is refused before anything
of the job has changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch import nn

from tmd.core.duties import Arm, Duty, Prepare, Sync
from tmd.core.errors import LinkError, StateMismatch
from tmd.core.model import Move
from tmd.fabric import Fabric, Link
from tmd.trainer import transfer
from tmd.trainer.data import Feed
from tmd.trainer.local import LocalState
from tmd.trainer.state import Layouts, Registry, decode_layouts, encode_layouts, mismatch
from tmd.trainer.takeover import Takeover, WalkOn, state_purpose

CONNECT_TIMEOUT_S = 10.0
LAYOUT_PURPOSE = "layout"

log = logging.getLogger("tmd.trainer")


class Carrier:
    """Owns the layout thread; the registered objects belong to the script."""

    def __init__(
        self, fabric: Fabric, registry: Registry, wrapped: list[nn.Module], local: LocalState
    ) -> None:
        self._fabric = fabric
        self._registry = registry
        self._wrapped = wrapped
        self._local = local
        self.seeds: tuple[int, ...] = ()
        """Base seed of every rank."""
        self.feed: Feed | None = None
        self._errand: tuple[Duty, Link] | None = None
        self._layouts: Layouts = registry.collect()[0]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="tmd-layout", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2)

    def cancel_unless(self, duty: Duty) -> None:
        """Break off the transfer under way if it belongs to another duty (any thread)."""
        errand = self._errand
        if errand is not None and errand[0] != duty:
            errand[1].close()

    def refusal(self, duty: Prepare) -> str:
        """Why this worker cannot take the rank of ``duty``; empty if it can.

        Raises:
            LinkError: no member could be asked.
        """
        link = self._fabric.connect(duty.source, LAYOUT_PURPOSE, timeout=CONNECT_TIMEOUT_S)
        try:
            theirs = decode_layouts(link.recv_frame(transfer.HEADER_LIMIT))
        finally:
            link.close()
        difference = mismatch(self._layouts, theirs)
        return (
            f"the model of this worker is not that of the job: {difference}" if difference else ""
        )

    def send(self, duty: Arm | Sync, move: Move, step: int) -> int:
        """Send the state of this rank at ``step`` to the joiner of ``move``; returns the bytes.

        Raises:
            LinkError: the joiner is gone.
            StateMismatch: the joiner refused, or received something else than was sent.
        """
        assert move.joiner is not None
        assert self.feed is not None
        layouts, tensors = self._registry.collect()
        local = self._local.held(move.rank, step)
        if isinstance(duty, Sync) and not local and self._local.is_live:
            log.warning("what only rank %d had is lost; this rank's own is sent", move.rank)
        header = transfer.Header(
            step=step,
            layouts=layouts,
            buckets=_buckets(self._wrapped),
            position=self.feed.position,
            seeds=self.seeds,
            local=local,
        )
        purpose = state_purpose(duty.plan, move.rank)
        link = self._fabric.connect(move.joiner, purpose, timeout=CONNECT_TIMEOUT_S)
        self._errand = (duty, link)
        try:
            transfer.offer(link, header)
            return transfer.send_tensors(link, tensors)
        finally:
            self._errand = None
            link.close()

    def receive(self, takeover: Takeover, cancelled: Callable[[], bool]) -> None:
        """Take over the state and the place in the data.

        Raises:
            LinkError: the source is gone, or the take-over was called off.
            StateMismatch: the state does not fit, or what arrived is not what was sent.
            WalkOn: the place in the data is in a later ``batches()`` call; call again from there.
        """
        assert self.feed is not None
        if takeover.link is None or takeover.header is None:
            self._meet(takeover, cancelled)
        link, header = takeover.link, takeover.header
        assert link is not None
        assert header is not None
        if header.position.call > self.feed.call:
            raise WalkOn
        self._errand = (takeover.duty, link)
        try:
            transfer.answer(link)
            targets, pending = self._registry.place(header.layouts)
            transfer.receive_tensors(link, targets)
        finally:
            self._errand = None
            link.close()
        for late in pending:
            late.apply()
        self._local.adopt(header.local)
        self.seeds = header.seeds
        takeover.timings["transfer"] = time.monotonic() - takeover.started

    def walk(self, takeover: Takeover) -> None:
        """Go to the place in the data that was taken over; the rank must be told by then."""
        assert self.feed is not None
        assert takeover.header is not None
        self.feed.seek(takeover.header.position.index)

    def _meet(self, takeover: Takeover, cancelled: Callable[[], bool]) -> None:
        purpose = state_purpose(takeover.plan, takeover.rank)
        link = self._fabric.accept(purpose, timeout=float("inf"), cancel=cancelled)
        takeover.started = time.monotonic()
        header = transfer.consider(link)
        refusal = mismatch(self._layouts, header.layouts) or self._bucket_refusal(header)
        if refusal:
            transfer.answer(link, refusal)
            link.close()
            raise StateMismatch(refusal)
        takeover.link, takeover.header = link, header

    def _bucket_refusal(self, header: transfer.Header) -> str:
        ours = _buckets(self._wrapped)
        if ours and header.buckets and ours != header.buckets:
            return f"gradient buckets differ: {ours} here, {header.buckets} there"
        return ""

    def _answer(self) -> None:
        blob = encode_layouts(self._layouts)
        while not self._closed.is_set():
            try:
                link = self._fabric.accept(
                    LAYOUT_PURPOSE, timeout=float("inf"), cancel=self._closed.is_set
                )
            except LinkError:
                continue
            try:
                link.send_frame(blob)
            except LinkError as error:
                log.info("layout not told: %s", error)
            finally:
                link.close()


def _buckets(wrapped: list[nn.Module]) -> str:
    """How DDP's reducer has grouped the parameters, once it has rebuilt its buckets."""
    parts = []
    for module in wrapped:
        data = getattr(module, "_get_ddp_logging_data", None)
        if data is not None:
            parts.append(str(data().get("rebuilt_per_bucket_param_indices", "")))
    return "|".join(parts)

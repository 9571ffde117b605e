"""The joiners that follow this rank, and the thread that lets them in.

The main thread tells of steps, the fabric tells of operations (:class:`tmd.fabric.Tap`); both pass
it on to every mirror. Without a joiner all of this costs a look at an empty tuple.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from msgspec import msgpack
from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import PURPOSE, SHIFT, VOTE, Dropped, Opening, ShadowRequest
from tmd.trainer.shadow.meter import Meter
from tmd.trainer.shadow.source import ShadowSource
from tmd.trainer.state.divided import UNFOLLOWED
from tmd.trainer.state.units import digest_of_inputs
from tmd.trainer.state_transfer.context import RankContext

log = logging.getLogger("tmd.trainer")


class ShadowSources:
    """Owns the door thread. Also the fabric's tap."""

    def __init__(self, context: RankContext) -> None:
        self._fabric = fabric = context.fabric
        self._state = context.state
        self._fit = context.fit
        self._verification = context.verification
        self._units = context.units
        self._limits = context.limits
        self._window = context.window
        self._mirrors: tuple[ShadowSource, ...] = ()
        self._changing = threading.Lock()
        self._announced = -1
        self._given: dict[str, str] = {}
        """By group: digest of what this rank put into the operation under way."""
        self._within, self._beside = Meter(), Meter()
        """Processor time of mirroring: in the job's threads, and in threads of its own."""
        fabric.tap = self
        threading.Thread(target=self._let_in, name="tmd-mirrors", daemon=True).start()

    # --- main thread ------------------------------------------------------------------------------

    def at_boundary(self, step: int) -> None:
        """``step`` begins; says so once, also if the step is tried again."""
        self._fit.look_at_buckets()
        if any(mirror.over for mirror in self._mirrors):
            self._sweep()
        if self._mirrors and step != self._announced and not self._verification.pending:
            self._announced = step
            with self._within.running():
                self._announce(step)

    def _announce(self, step: int) -> None:
        if why := self._units.stale:
            self.drop_all(why, final=True)
        assert self._state.feed is not None
        position, quiet = self._state.feed.position, self._fabric.quiet
        for mirror in self._mirrors:
            mirror.at_boundary(step, position, quiet=quiet)
        self._window.open(step)
        for mirror in self._mirrors:
            mirror.wake()

    def close_window(self) -> None:
        """The parameters are about to change."""
        if self._window.version is not None:
            self._window.close()

    def before_optimizer(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to apply the final gradients of a step that counts."""
        if self._mirrors:
            with self._within.running():
                for mirror in self._mirrors:
                    mirror.before_optimizer(step, self._units.optimizers.index(optimizer))

    def drop_all(self, reason: str, *, final: bool = False) -> None:
        """What was shown is worth nothing, or there is nothing to show any more."""
        self._window.close()
        for mirror in self._mirrors:
            mirror.drop(reason, final=final)
        self._sweep()

    def spent(self) -> dict[str, float]:
        """Processor seconds since the last call, by name as in a plan's timings."""
        return {"mirror_within": self._within.read(), "mirror_beside": self._beside.read()}

    def close(self) -> None:
        """The process ends: no thread may be inside torch then."""
        self._window.close()
        for mirror in self._mirrors:
            mirror.close()

    def taken(self, plan: str, cancelled: Callable[[], bool]) -> bool:
        """After a switch: whether the joiner of ``plan`` goes on from what it has been shown."""
        # An older one may not have noticed yet that its link is gone; one that is not live yet
        # cannot have shown the vote.
        found = [m for m in self._mirrors if m.plan == plan and m.live]
        taken = bool(found) and found[-1].wait_until_taken(cancelled)
        self.drop_all("this worker holds no rank any more")
        return taken

    # --- tap: the threads of the groups -----------------------------------------------------------

    def given(self, op: str, group: str, inputs: Sequence[Tensor]) -> None:
        """A collective begins; operations of a group run one after the other."""
        if any(mirror.tries for mirror in self._mirrors):
            with self._within.running():
                self._given[group] = digest_of_inputs(op, inputs)

    def output(self, op: str, group: str, outputs: Sequence[Tensor]) -> None:
        """A collective is complete, or a message has come."""
        if not self._mirrors:
            return
        if op == "recv_anysource":
            # A shadow could not tell which of its receives a message was for.
            self.drop_all("messages from any rank cannot be mirrored")
            return
        given = self._given.pop(group, "")
        with self._within.running():
            for mirror in self._mirrors:
                mirror.output(group, op, outputs, given)

    def voted(self, result: Sequence[int]) -> None:
        """A vote came out."""
        for mirror in self._mirrors:
            mirror.said(VOTE, msgpack.encode(list(result)))

    def shifted(self, offset: int, payload: bytes) -> None:
        """A shift came out."""
        for mirror in self._mirrors:
            mirror.said(f"{SHIFT}{offset}", payload)

    # --- door thread ------------------------------------------------------------------------------

    def _let_in(self) -> None:
        while True:
            try:
                link = self._fabric.accept(PURPOSE)
            except LinkError:
                return
            try:
                self._admit(link)
            except Exception as error:
                # Whatever it was: the next joiner must find the door open.
                log.info("no shadow: %s", error)
                link.close()

    def _admit(self, link: Link) -> None:
        link.patience(HELLO_S)
        follow, _ = frames.receive(link)
        if not isinstance(follow, ShadowRequest):
            raise LinkError(f"{link.peer} began with {type(follow).__name__}")
        link.patience(0)
        answer = self._answer()
        frames.send(link, frames.Envelope(answer))
        if isinstance(answer, Dropped):
            link.close()
            return
        mirror = ShadowSource(link, follow, self._units, self._window, self._limits, self._beside)
        self._sweep(mirror)

    def _answer(self) -> Opening | Dropped:
        if self._fabric.standing is None or self._fabric.poisoned:
            return Dropped("the rank does not train at the moment")
        offer = self._fit.offer(self._state.layouts)
        feed = self._state.feed
        if feed is None or feed.closed:
            # It may be the last batches() call: who was sent on to a next one would leave the loop
            # and run what comes after training.
            return Dropped("the rank is between two batches() calls", offer=offer)
        if self._units.divided:
            return Dropped(UNFOLLOWED, offer=offer)
        return Opening(offer)

    def _sweep(self, *new: ShadowSource) -> None:
        with self._changing:
            self._mirrors = tuple(m for m in (*self._mirrors, *new) if not m.over)


HELLO_S = 10.0
"""Time that a peer has to say what it wants."""

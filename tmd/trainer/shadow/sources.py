"""The joiners that shadow this rank, and the thread that admits them.

The main thread reports steps, and the fabric reports operations (:class:`tmd.fabric.Tap`). Both are
forwarded to every joiner. Without a joiner this costs a look at an empty tuple.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch
from msgspec import msgpack
from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import PURPOSE, SHIFT, VOTE, Dropped, Opening, ShadowRequest
from tmd.trainer.shadow.meter import Meter
from tmd.trainer.shadow.output_load import OutputLoad
from tmd.trainer.shadow.source import ShadowSource
from tmd.trainer.shadow.source_context import SourceContext
from tmd.trainer.state.divided import NOT_SHADOWED
from tmd.trainer.state.units import digest_of_inputs
from tmd.trainer.state_transfer.context import RankContext

log = logging.getLogger("tmd.trainer")


class ShadowSources:
    """Owns the thread that admits joiners. Also the fabric's tap."""

    def __init__(self, context: RankContext) -> None:
        self._fabric = fabric = context.fabric
        self._state = context.state
        self._fit = context.fit
        self._verification = context.verification
        self._units = context.units
        self._limits = context.limits
        self._window = context.window
        self._load = OutputLoad(context.limits)
        self._copying: ShadowSource | None = None
        """One that was copying the state when the present step began."""
        self._mirrors: tuple[ShadowSource, ...] = ()
        self._changing = threading.Lock()
        self._announced = -1
        self._in_step = False
        """Whether a step in which an optimizer runs has begun, and not been voted on."""
        self._within, self._beside = Meter(), Meter()
        """Processor time of mirroring: in the job's threads, and in its own threads."""
        fabric.tap = self
        threading.Thread(target=self._let_in, name="tmd-mirrors", daemon=True).start()

    # --- main thread ------------------------------------------------------------------------------

    def at_boundary(self, step: int) -> None:
        """``step`` begins; announced once, even if the step is repeated."""
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
        now = time.monotonic()
        self._load.end(now, counts=self._copying is not None and self._copying.copies)
        for mirror in self._mirrors:
            mirror.at_boundary(step, position, quiet=quiet)
        self._copying = next((mirror for mirror in self._mirrors if mirror.copies), None)
        if self._copying is not None:
            self._load.begin(now)
        self._window.open(step)
        for mirror in self._mirrors:
            mirror.wake()

    def close_window(self) -> None:
        """The parameters may change afterwards."""
        if self._window.version is not None:
            self._window.close()

    def begin_step(self, *, trains: bool) -> None:
        """A step begins. If it does not ``train``, it is a function of ``session.repeatable()``,
        which may exchange parameters."""
        self._in_step = trains
        if trains:
            return
        self.close_window()
        for mirror in self._mirrors:
            mirror.evaluates()

    def close_feed(self) -> None:
        """A ``batches()`` call has ended: the script may change the parameters, and do anything
        else, before the next step."""
        self.close_window()
        self._load.end(time.monotonic(), counts=False)

    def before_optimizer(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to apply the final gradients of a committed step."""
        if self._mirrors:
            with self._within.running():
                for mirror in self._mirrors:
                    mirror.before_optimizer(step, self._units.optimizers.index(optimizer))

    def hold(self, plan: str, step: int) -> bool:
        """Whether the switch of ``plan`` should not follow ``step``, for one of its joiners that
        shadow this rank: see :meth:`ShadowSource.holds`."""
        # Of each joiner the newest: it may have come back, and the older link is not known to be
        # gone. All are asked, so that the time for which the switch waits begins for all.
        newest = {m.joiner: m for m in self._mirrors if m.plan == plan and m.is_followed}
        holding = [mirror.holds(step) for mirror in newest.values()]
        return any(holding)

    def drop_all(self, reason: str, *, final: bool = False) -> None:
        """End all shadows, whose outputs became void or whose rank ends."""
        self._window.close()
        for mirror in self._mirrors:
            mirror.drop(reason, final=final)
        self._copying = None
        self._sweep()

    def spent(self) -> dict[str, float]:
        """Processor seconds since the last call, by name as in a plan's timings."""
        return {"mirror_within": self._within.read(), "mirror_beside": self._beside.read()}

    def close(self) -> None:
        """Stop the threads, since none may be inside torch when the process ends."""
        self._window.close()
        for mirror in self._mirrors:
            mirror.close()

    def hand_over(self, plan: str, step: int) -> None:
        """After a switch: send the last frames to joiners of ``plan`` that get only gradients."""
        assert self._state.feed is not None
        for mirror in self._mirrors:
            if mirror.plan == plan:
                mirror.hand_over(step, self._state.feed.position)

    def release(self, plan: str) -> None:
        """After a switch: a joiner of ``plan`` that has shadowed this rank takes another one."""
        for mirror in self._mirrors:
            if mirror.plan == plan:
                mirror.release()

    def taken(self, plan: str, cancelled: Callable[[], bool]) -> bool:
        """After a switch: whether the joiner of ``plan`` has assumed the rank from its shadow."""
        # An older joiner may not have noticed yet that its link is gone, and one that is not live
        # cannot have received the vote.
        found = [m for m in self._mirrors if m.plan == plan and m.live]
        taken = bool(found) and found[-1].wait_until_taken(cancelled)
        self.drop_all("this worker no longer holds the rank")
        return taken

    # --- tap: the threads of the groups -----------------------------------------------------------

    @property
    def follows(self) -> bool:
        return bool(self._mirrors)

    def given(self, op: str, group: str, inputs: Sequence[Tensor]) -> str:
        """A collective begins. Returns the digest of its inputs if a joiner has to prove itself."""
        # Outside training steps a script may gather what only its process knows: times, names of
        # files, how much it has logged. Once a joiner is in step, only sums are compared.
        if not self._in_step:
            return ""
        sums = op in SUMS and all(map(Tensor.is_floating_point, inputs))
        if not any(m.needs_proof or (sums and m.live and m.proves_sums) for m in self._mirrors):
            return ""
        with self._within.running():
            return digest_of_inputs(op, inputs)

    def output(self, op: str, group: str, outputs: Sequence[Tensor], given: str = "") -> None:
        """A collective is complete, or a message has arrived."""
        if not self._mirrors:
            return
        if op == "recv_anysource":
            # A shadow could not assign the message to one of its receives.
            self.drop_all("messages from any rank cannot be mirrored")
            return
        with self._within.running():
            if self._copying is not None:
                self._load.add(outputs)
            for mirror in self._mirrors:
                mirror.output(group, op, outputs, given)

    def voted(self, result: Sequence[int]) -> None:
        """A vote has ended."""
        self._in_step = False
        for mirror in self._mirrors:
            mirror.send_result(VOTE, msgpack.encode(list(result)))

    def shifted(self, offset: int, payload: bytes) -> None:
        """A shift has ended."""
        for mirror in self._mirrors:
            mirror.send_result(f"{SHIFT}{offset}", payload)

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
                # No error may keep the next joiner out.
                log.info("a joiner was not admitted: %s", error)
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
        context = SourceContext(self._units, self._window, self._limits, self._beside, self._load)
        mirror = ShadowSource(link, follow, context)
        self._sweep(mirror)

    def _answer(self) -> Opening | Dropped:
        if self._fabric.standing is None or self._fabric.poisoned:
            return Dropped("the rank does not train at the moment")
        offer = self._fit.offer(self._state.layouts)
        feed = self._state.feed
        if feed is None or feed.closed:
            # This may be the last batches() call: a joiner sent on to the next one would leave the
            # loop and run the code after training.
            return Dropped("the rank is between two batches() calls", offer=offer)
        if self._units.divided:
            return Dropped(NOT_SHADOWED, offer=offer)
        return Opening(offer)

    def _sweep(self, *new: ShadowSource) -> None:
        with self._changing:
            self._mirrors = tuple(m for m in (*self._mirrors, *new) if not m.over)


SUMS = ("allreduce", "reduce_scatter")
"""Collectives of gradients."""
HELLO_S = 10.0
"""Longest time until a peer has sent its request."""

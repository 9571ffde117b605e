"""All groups of this worker in their current generation, and the next one while it is built.

Order matters here. The generations of a coming epoch are built one after another, in the order in
which the script made the groups, on all members: several at once may wait for each other. A group
without a generation, as at the start of a job or one that no member had used before, gets one when
it is first used, which is in the same order on all members. A loss first marks all generations as
aborted, so that no later call waits, and then aborts all inner groups at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tmd.core.values.errors import IllegalTransition
from tmd.core.values.model import Membership
from tmd.fabric.generations.aborts import ABORT_S, SETTLE_S, Aborts, OnHung
from tmd.fabric.generations.beside import BesideBuilds
from tmd.fabric.generations.generation import Generation, members_of
from tmd.fabric.generations.inner import BuildTime, Inner, InnerKind
from tmd.fabric.generations.preparation import Preparation
from tmd.fabric.generations.states import GenerationState
from tmd.fabric.grouping import GroupView

HOST = torch.device("cpu")
BUILT_S = 30.0
"""Longest wait at a switch for inner groups that all other members have built."""
LOOK_S = 0.1
"""How often a thread that waits at a switch looks whether a member is lost."""
HUNG_LIMIT = 2
"""Hung builds after which a worker takes part in no further planned move."""

log = logging.getLogger("tmd.trainer")


class GenerationLimits(NamedTuple):
    """Times after which something counts as hung."""

    build_s: float = 120.0
    """Longest time that a build beside training waits for the end of one that was dropped."""
    hurried_s: float = 5.0
    """The same for a build for which training waits: at the start, at a switch or after a loss."""
    at_switch_s: float = 120.0
    """Longest wait for a build at a switch. Then the step is dropped, and all are built anew."""
    abort_s: float = ABORT_S
    settle_s: float = SETTLE_S


LIMITS = GenerationLimits()


def _warn(hung: tuple[str, ...]) -> None:
    log.error("the groups %s hang: their collectives may never end", ", ".join(hung))


def _ignore(failure: str) -> None:
    pass


class Generations:
    """The inner groups of one worker. The main thread changes epochs; any thread may call
    :meth:`lose` and :meth:`of`.

    Args:
        kind: builds the inner groups; ``None``: tmd's own algorithms do all collectives.
        carrier: names what carries collectives, to compare it with that of other workers.
        on_hung: see :class:`Aborts`.
    """

    def __init__(
        self,
        kind: InnerKind | None = None,
        *,
        carrier: str = "own",
        limits: GenerationLimits = LIMITS,
        on_hung: OnHung = _warn,
    ) -> None:
        self.kind, self.carrier = kind, carrier
        self.aborts = Aborts(limits.abort_s, limits.settle_s, on_hung)
        self._limits = limits
        self._held: Membership | None = None
        """The membership whose generations are used; ``None`` in the sandbox and after a loss."""
        self._live: dict[str, Generation] = {}
        self._used: dict[str, torch.device] = {}
        """For each group, the device of the tensors of its latest collective."""
        self._next: Preparation | None = None
        self._unfinished: list[Preparation] = []
        """Preparations whose thread may not have ended, both dropped ones and those in use."""
        self._to_free: list[Generation] = []
        self._refusal = "nothing is prepared"
        self.beside = BesideBuilds()
        self._changing = threading.RLock()

    # --- use -----------------------------------------------------------------------------------

    def takes(self, tensor: Tensor) -> bool:
        """Whether inner groups communicate tensors like this one."""
        return self.kind is not None and self.kind.takes(tensor)

    def of(self, view: GroupView, device: torch.device = HOST) -> Inner | None:
        """The inner group of a group, once it is built; ``None`` if a member is lost."""
        return self.in_use(view, device)[1]

    def in_use(
        self, view: GroupView, device: torch.device
    ) -> tuple[Generation | None, Inner | None]:
        """The generation of a group for tensors on ``device``, and its inner group; see
        :meth:`of`."""
        while (generation := self._begun(view, device)) is not None:
            inner = generation.use()
            if not generation.unneeded:
                return generation, inner
        return None, None

    def _begun(self, view: GroupView, device: torch.device) -> Generation | None:
        """The generation of a group, which may still be built; ``None`` if a member is lost."""
        with self._changing:
            self._used[view.name] = device
            if self._held is None:
                return None
            held, found = self._held, self._live.get(view.name)
            if found is not None and not (found.unneeded or found.state is GenerationState.FREED):
                return found
            again = found is not None and found.unneeded and found.epoch == held.epoch
            round = found.round + 1 if again and found is not None else 0
            made = self._live[view.name] = Generation(view, held, device, round=round)
        Preparation(held, [made], self.kind, None, 0.0, _ignore).start()
        return made

    def live(self, name: str) -> Generation | None:
        """The generation that a group uses, perhaps aborted; ``None`` before the first."""
        return self._live.get(name)

    def failure(self, name: str) -> str:
        """Why the group has no inner group; empty if it has one, or may have."""
        return "" if (found := self._live.get(name)) is None else found.failure

    # --- the next epoch --------------------------------------------------------------------------

    @property
    def obstacle(self) -> str:
        """Why this worker takes part in no planned move; empty if it does."""
        with self._changing:
            hung = sum(each.hung for each in self._running)
        return f"{hung} earlier builds of groups hang" if hung >= HUNG_LIMIT else ""

    @property
    def _running(self) -> list[Preparation]:
        """Preparations, dropped or in use, whose threads have not ended."""
        self._unfinished = [each for each in self._unfinished if each.running]
        return self._unfinished

    def prepare(
        self,
        views: Sequence[GroupView],
        membership: Membership,
        done: Callable[[str], None] = _ignore,
        *,
        when: BuildTime = BuildTime.BESIDE,
    ) -> None:
        """Build the groups of ``membership`` in a thread, from now on or from the switch on.

        ``done`` is called, in any thread, with the reason why they cannot be built, or with an
        empty one once the epoch can be switched to; not if the preparation is dropped.

        A group whose members stay keeps its generation. After a loss nothing is kept. An earlier
        preparation is dropped. The new build begins once the thread of the earlier one has ended,
        or after a time: see :class:`GenerationLimits`.
        """
        limits = self._limits
        with self._changing:
            self._drop("another epoch is prepared")
            former = self._running[-1] if self._running else None
            wait_s = limits.at_switch_s if when is BuildTime.AT_SWITCH else None
            fresh = [
                Generation(view, membership, self._used.get(view.name), when=when, wait_s=wait_s)
                for view in views
                if self._changes(view, membership)
            ]
            patience_s = limits.build_s if when is BuildTime.BESIDE else limits.hurried_s

            def ended(why: str) -> None:
                if any(generation.only_at_switch for generation in fresh):
                    self.beside.failed(why)
                done(why)

            coming = Preparation(membership, fresh, self.kind, former, patience_s, ended)
            self._next, self._refusal = coming, ""
        # Not under the lock: it may call ``done`` at once.
        coming.start()

    def _changes(self, view: GroupView, later: Membership) -> bool:
        if self.kind is None:
            return False
        return self._held is None or members_of(view, self._held) != members_of(view, later)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the preparation; returns whether it is ready to be switched to."""
        coming = self._next
        return coming is not None and coming.settled.wait(seconds) and coming.ready

    @property
    def refusal(self) -> str:
        """Why no preparation can be switched to; empty if one can, or may later."""
        coming = self._next
        return self._refusal if coming is None else coming.failure

    def switch(self, membership: Membership) -> None:
        """Use the generations of ``membership`` from now on, in the main thread.

        The caller has waited for its device, so its calls in the previous generations are done.
        Those are freed by :meth:`reap`, or once all members have come to a build at the switch.

        Raises:
            IllegalTransition: those of the epoch are not ready; nothing has changed.
        """
        with self._changing:
            coming = self._next
            if coming is None or (why := _obstacle(coming, membership)):
                if self.kind is not None:
                    why = self._refusal if coming is None else why
                    epoch = membership.epoch
                    raise IllegalTransition(f"the groups of epoch {epoch} are not ready: {why}")
                self._held = membership
                return
            self._next, self._held = None, membership
            self._refusal = "nothing is prepared"
            for generation in coming.by_name.values():
                if coming.at_switch:
                    generation.replaces = self._live.get(generation.name)
                elif not generation.unneeded:
                    generation.switch_to()
                self._retire(generation.name)
            self._live.update(coming.by_name)
            # Groups that were first used since it was prepared: their next use builds them.
            unprepared = {g.name for g in self._live.values() if not g.has_members_of(membership)}
            for name in unprepared | coming.destroyed:
                self._retire(name)
            if coming.at_switch:
                self.beside.switched()
                self._unfinished.append(coming)
                coming.begin()

    def follow(self, membership: Membership, lost: Callable[[], bool]) -> str:
        """Like :meth:`switch`, but returns why not; empty if it was done.

        The members voted after they had built theirs. A joiner may need a moment more, and this
        waits for it. After a failure no generation is used any more, since the other members have
        switched already.
        """
        deadline = time.monotonic() + BUILT_S
        while (coming := self._next) is not None and not coming.settled.wait(LOOK_S):
            if lost() or time.monotonic() > deadline:
                break
        try:
            self.switch(membership)
        except IllegalTransition as error:
            self._lose_all(str(error))
            return str(error)
        return ""

    def enter(self, membership: Membership) -> None:
        """Use new generations only: at the start, and after a loss.

        Those that are prepared for this epoch may not be built yet. A collective waits for its own.
        """
        with self._changing:
            coming, self._next = self._next, None
            for name in list(self._live):
                self._retire(name)
            self._held = membership
            if coming is not None and coming.is_for(membership):
                self._live.update(coming.by_name)
                self._unfinished.append(coming)
            elif coming is not None:
                self._give_up(coming, "another epoch was entered")

    def leave(self) -> None:
        """This worker holds no rank any more. What is prepared stays."""
        with self._changing:
            for name in list(self._live):
                self._retire(name)
            self._held = None

    def destroy_group(self, name: str) -> None:
        """The script has destroyed a group, on all its members."""
        with self._changing:
            destroyed = self._live.get(name)
            self._used.pop(name, None)
            self._retire(name)
            if self._next is not None:
                self._next.destroyed.add(name)
            if destroyed is not None:
                self._free([destroyed])

    def _retire(self, name: str) -> None:
        if (old := self._live.pop(name, None)) is not None:
            old.retire()
            if old not in self._to_free:
                self._to_free.append(old)

    def discard(self, membership: Membership | None = None) -> None:
        """Drop the prepared generations; with ``membership``, only if they are for it. A build that
        is running is not interrupted."""
        with self._changing:
            coming = self._next
            if coming is not None and (membership is None or coming.is_for(membership)):
                self._drop("the preparation was dropped")

    def _drop(self, why: str) -> None:
        coming, self._next = self._next, None
        if coming is not None:
            self._refusal = why
            self._give_up(coming, why)

    def _give_up(self, coming: Preparation, why: str) -> None:
        coming.give_up(why)
        self._to_free += coming.by_name.values()
        self._unfinished.append(coming)

    # --- a loss ----------------------------------------------------------------------------------

    def lose(self, epoch: int) -> None:
        """A member of ``epoch`` is lost: end what runs in all groups, and drop what is prepared.

        Returns at once; see :meth:`await_aborts`. Without effect in any other epoch.
        """
        with self._changing:
            if self._held is not None and self._held.epoch == epoch:
                self._lose_all("a member is lost")

    def _lose_all(self, why: str) -> None:
        with self._changing:
            self._held = None
            self._drop(why)
            if self._abort_all():
                self.aborts.watch()

    def _abort_all(self, but: Collection[str] = ()) -> bool:
        """Begin to abort what is used; returns whether there is something new to abort."""
        used = {*self._live.values(), *self._to_free}
        lost = [each for each in used if each.name not in but and each.lose()]
        self.aborts.begin(lost)
        return bool(lost)

    def await_aborts(self, within_s: float) -> tuple[str, ...]:
        """See :meth:`Aborts.await_end`."""
        return self.aborts.await_end(within_s)

    # --- the end ---------------------------------------------------------------------------------

    def reap(self) -> None:
        """Free what no member uses any longer, as after the first commit of a new epoch.

        What is still being built or aborted is freed by a later call.
        """
        if not self._to_free:
            return
        with self._changing:
            self._free(self._to_free)

    def _free(self, generations: Sequence[Generation]) -> None:
        aborting = self.aborts.running()
        for generation in generations:
            if generation not in aborting:
                generation.close()
        self._to_free = [each for each in self._to_free if each.state is not GenerationState.FREED]

    def close(self, within_s: float, ended: Collection[str] = ()) -> tuple[str, ...]:
        """End all groups; returns those that hang, whose resources leak.

        Groups named in ``ended`` have no operation running. They are freed without an abort, since
        other members may still need them.
        """
        with self._changing:
            self._drop("the worker has ended")
            self._held = None
            self._abort_all(ended)
            for name in list(self._live):
                self._retire(name)
        hung = self.await_aborts(within_s)
        self.reap()
        if self.kind is not None:
            hung += self.kind.end(within_s)
        if hung:
            log.warning("the groups %s could not be ended", ", ".join(hung))
        return hung


def _obstacle(coming: Preparation, membership: Membership) -> str:
    """Why ``coming`` cannot be switched to as ``membership``; empty if it can."""
    if not coming.is_for(membership):
        return "those of another membership are prepared"
    return "" if coming.ready else coming.failure or "they are still being built"

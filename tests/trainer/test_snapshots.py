"""Copies of a state: made within a step, stored by a peer, restored bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from tests.trainer.contexts import context_of
from tests.trainer.scripts import Averaged, Forked, Scheduled, Script, normed
from tests.trainer.wire import Facts, linked
from tmd.core.planning.directives import Sync
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.model import Member, Membership, Move
from tmd.core.values.snapshots import Kept
from tmd.fabric import Fabric
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.copies import StateCopy, digest_of_bodies
from tmd.trainer.protocol.frames import Bring, Envelope, Unit, specs_of
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.snapshots.writer import WriterStage, receive_copy, send_copy
from tmd.trainer.state.data import Feed
from tmd.trainer.state.layout import flatten
from tmd.trainer.state.placing import DataPlace
from tmd.trainer.state.roles import Role
from tmd.trainer.state.units import Units, whole_digest
from tmd.trainer.state_transfer.verification import StateVerification

pytestmark = pytest.mark.timeout(60)

KEY = bytes(32)
SCRIPTS = {
    "AdamW": Script,
    "scheduler": Scheduled,
    "missing gradients": Forked,
    "buffers": lambda s: Script(s, build=normed),
    "loose parameters": Averaged,
}
Seen = tuple[Kept, ...]


class Rank(Facts):
    """One of several workers in this process; its snapshots are real, its steps are simulated."""

    def __init__(self, number: int, script: Script, every: int = 2, rate: float = 1e6) -> None:
        super().__init__()
        self.script = script
        self.fabric = Fabric(f"w{number}", KEY)
        self.member = Member(f"w{number}", f"h{number}", self.fabric.address)
        limits = ShadowLimits(copy_mb_s=rate)
        self.context = context_of(script.registry(), self.fabric, limits=limits)
        self.units, self.window = self.context.units, self.context.window
        self.state = self.context.state
        self.state.feed = Feed(range(100), 0, lambda: 0, lambda: DataPlace(0, 1))
        self.step = 0
        self.kept: Seen = ()
        self.snapshots = Snapshots(self.context, every, self.note)

    def note(self, kept: Seen) -> None:
        with self.changing():
            self.kept = kept

    def settled(self) -> int:
        """The final stage of the snapshot."""
        self.until(lambda: self.ballot() != WriterStage.GOING)
        return self.ballot()

    def ballot(self, *, torn: bool = False) -> int:
        return self.snapshots.ballot(self.step, torn=torn)

    def apply(self) -> None:
        """The rest of a committed step."""
        assert self.state.feed is not None
        self.window.close()
        self.script.backward(self.step)
        self.script.apply()
        self.state.feed.next(self.step)
        self.state.feed.commit()
        self.step += 1

    def until(self, enough: object, timeout: float = 30.0) -> None:
        assert callable(enough)
        # The stage notifies nobody, so it is polled.
        while not self.within(0.01, enough):
            timeout -= 0.01
            if timeout < 0:
                raise TimeoutError("it never came to that")

    def close(self) -> None:
        self.snapshots.close()
        self.fabric.close()


@contextmanager
def ranks(scripts: Sequence[Script], **how: Any) -> Iterator[list[Rank]]:
    """Workers of one epoch, each on a host of its own."""
    with ExitStack() as stack:
        made = [Rank(number, script, **how) for number, script in enumerate(scripts)]
        membership = Membership(1, tuple(r.member for r in made))
        for number, rank in enumerate(made):
            stack.callback(rank.close)
            rank.fabric.enter(membership, number)
            rank.fabric.learn(tuple(() for _ in made))
        yield made


def train(made: Sequence[Rank], steps: int) -> list[int]:
    """Steps of all ranks that wait for each snapshot; returns the result of each vote."""
    least_of_all = []
    for _ in range(steps):
        for rank in made:
            rank.snapshots.at_boundary(rank.step)
        least = min(rank.settled() for rank in made)
        least_of_all.append(least)
        for rank in made:
            rank.snapshots.voted(least)
            rank.apply()
    return least_of_all


def back(rank: int, step: int, source: Member | None = None) -> Sync:
    membership = Membership(2, ())
    leaver = Member("gone", "h", "")
    return Sync("p", membership, rank, step, (Move(rank, leaver, None, source),), step, back=True)


@pytest.mark.parametrize("make", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_state_is_restored_bit_for_bit(make: type[Script]) -> None:
    """The following steps give the same results as before."""
    with ranks([make(1), make(2)]) as made:
        one = made[0]
        train(made, 2)
        before = whole_digest(one.units, 2)
        train(made, 2)
        after = whole_digest(one.units, 4)
        train(made, 1)
        assert Kept(0, 4) in one.kept
        one.state.early.stand(4)  # as if it had reached that step again
        one.state.early.begin()
        one.snapshots.put_back(back(0, 4))
        assert one.state.early.of(4)() == after
        assert whole_digest(one.units, 4) == after
        assert one.state.feed is not None
        assert one.state.feed.position.index == 4
        assert before != after

        one.step = 4
        straight, other = make(1), one.script
        straight.train(range(7))
        for _ in range(3):
            one.apply()
        assert whole_digest(Units(other.registry()), 7) == whole_digest(
            Units(straight.registry()), 7
        )


def test_what_an_optimizer_has_made_since_is_gone_after_a_rollback() -> None:
    """Some count their steps under a key of their own, which they make in the first one."""
    with ranks([Script(1)]) as made:
        (rank,) = made
        train(made, 1)
        (optimizer,) = rank.script.registry().optimizers
        optimizer.state["steps"] = torch.tensor(7)  # type: ignore[index]
        rank.snapshots.put_back(back(0, 0))

        assert "steps" not in optimizer.state


def test_each_rank_keeps_its_own_and_the_copy_of_another_host() -> None:
    """Only of the newest complete snapshot, once all ranks know it."""
    with ranks([Script(1), Script(2), Script(3)]) as made:
        train(made, 3)

        assert [r.kept for r in made] == [
            (Kept(0, 2), Kept(2, 2)),
            (Kept(0, 2), Kept(1, 2)),
            (Kept(1, 2), Kept(2, 2)),
        ]


def test_the_previous_snapshot_stays_until_the_next_is_complete() -> None:
    """A loss in between can use it."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 2)
        for rank in made:
            rank.snapshots.at_boundary(2)
        for rank in made:
            rank.settled()

        assert all({k.step for k in rank.kept} == {0, 2} for rank in made)
        assert all(len(rank.kept) == 4 for rank in made)


def test_a_rank_that_begins_a_step_late_takes_none_that_the_others_lack() -> None:
    """They are in the middle of the step when they enter the epoch: all take the next one."""
    with ranks([Script(1), Script(1)]) as made:
        within, late = made
        train(made, 3)
        later = Membership(2, tuple(r.member for r in made))
        for number, rank in enumerate(made):
            rank.fabric.enter(later, number)
        late.snapshots.skip(late.step)
        late.snapshots.at_boundary(late.step)
        assert late.ballot() == within.ballot() == WriterStage.DONE
        for rank in made:
            rank.snapshots.voted(WriterStage.DONE)
            rank.apply()
        assert Kept(0, 2) in within.kept
        assert Kept(1, 2) in late.kept
        train(made, 1)
        assert Kept(0, 4) in within.kept
        assert Kept(1, 4) in late.kept


def test_a_step_that_ends_too_soon_takes_no_snapshot() -> None:
    """Training does not wait; all ranks drop their copies and keep the previous snapshot."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 2)
        with made[0].window._reading:
            for rank in made:
                rank.snapshots.at_boundary(2)
            made[0].window._version = None
        least = min(rank.settled() for rank in made)
        for rank in made:
            rank.snapshots.voted(least)

        assert least == WriterStage.FAILED
        assert all({k.step for k in rank.kept} == {0} for rank in made)
        for rank in made:
            rank.apply()
        assert train(made, 2) == [WriterStage.DONE, WriterStage.DONE]
        assert all({k.step for k in rank.kept} == {4} for rank in made)


def test_a_step_that_changes_parameters_for_the_first_time_takes_no_snapshot() -> None:
    """The copies may hold values of its middle; one that was finished before it stays good."""
    with ranks([Script(1)]) as made:
        (rank,) = made
        rank.snapshots.at_boundary(0)
        rank.settled()
        assert rank.ballot(torn=True) == WriterStage.FAILED
        rank.apply()
        assert rank.ballot() == WriterStage.FAILED
        rank.snapshots.voted(WriterStage.FAILED)
        assert rank.kept == ()

        rank.apply()
        rank.snapshots.at_boundary(2)
        rank.settled()
        rank.apply()
        assert rank.ballot(torn=True) == WriterStage.DONE


def test_a_snapshot_that_is_due_at_an_evaluation_is_taken_at_the_next_step() -> None:
    """The evaluation may exchange the weights for a while."""
    with ranks([Script(1), Script(1)]) as made:
        train(made, 2)
        for rank in made:
            assert rank.state.feed is not None
            rank.state.feed.due = "evaluate"
            rank.snapshots.at_boundary(2)
            assert rank.ballot() == WriterStage.DONE
            assert {k.step for k in rank.kept} == {0}
            rank.state.feed.due = ""
            rank.apply()
        train(made, 1)

        assert all({k.step for k in rank.kept} == {3} for rank in made)


def test_a_copy_that_is_sent_slowly_keeps_the_link_busy() -> None:
    """A unit takes longer than its keeper waits for bytes."""
    body = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    layout, _ = flatten(body)
    entry = Envelope(Unit(5, 0, layout), specs_of([body])), body
    entries = (entry, entry)
    copy = StateCopy(0, 5, {}, entries, digest_of_bodies(entries))
    with linked() as (near, far):
        far.patience(1.0)
        how = {"rate": 8192.0, "over": threading.Event()}
        sender = threading.Thread(target=send_copy, args=(near, copy), kwargs=how)
        sender.start()
        bring, _ = frames.receive(far)
        assert isinstance(bring, Bring)
        received = receive_copy(far, bring)
        sender.join()

    assert received is not None
    assert received.digest == copy.digest


def test_a_dead_keeper_ends_only_the_snapshot() -> None:
    """The vote reports it, and training continues."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 2)
        made[1].close()
        made[0].snapshots.at_boundary(2)

        assert made[0].settled() == WriterStage.FAILED
        assert {k.step for k in made[0].kept} == {0, 2}


def test_a_joiner_fetches_the_copy_and_becomes_the_rank() -> None:
    """The joiner has never trained."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 3)
        joiner = Rank(9, Script(5))
        directive = back(0, 2, made[1].member)
        joiner.snapshots.fetch(directive, lambda: True)
        joiner.snapshots.put_back(directive)
        straight = Script(1)
        straight.train(range(2))

        assert joiner.kept == (Kept(0, 2),)
        assert whole_digest(joiner.units, 2) == whole_digest(Units(straight.registry()), 2)
        with pytest.raises(LinkError, match="no copy of rank 0 at step 8"):
            joiner.snapshots.fetch(back(0, 8, made[1].member), lambda: True)
        joiner.close()


@pytest.mark.parametrize("joins", [False, True], ids=["a survivor", "the joiner"])
def test_a_snapshot_that_is_taken_again_after_a_rollback_replaces_no_good_copy(joins: bool) -> None:
    """The new one may be torn: the step changes parameters before its optimizer runs, which a
    joiner does not know yet."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 3)
        rank = Rank(9, Script(5)) if joins else made[0]
        directive = back(0, 2, made[1].member)
        rank.snapshots.fetch(directive, lambda: True)
        rank.snapshots.put_back(directive)
        good = rank.snapshots._copy(directive).digest
        rank.step = 2
        rank.fabric.enter(Membership(2, (rank.member, made[1].member)), 0)
        rank.fabric.learn(((), ()))
        with torch.no_grad():
            rank.units.params[0].mul_(2)
        rank.snapshots.at_boundary(2)
        rank.settled()
        kept = made[1].snapshots._copy(directive)

        assert rank.ballot(torn=True) == WriterStage.DONE
        assert rank.snapshots._copy(directive).digest == kept.digest == good
        if joins:
            rank.close()


def test_a_keeper_does_not_replace_a_copy_of_the_whole_snapshot() -> None:
    """By that of a worker that has got the rank from a replica, and whose step may be torn."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 3)
        good = made[1].snapshots._copy(back(0, 2)).digest
        joiner = Rank(9, Script(5))
        joiner.step = 2
        joiner.fabric.enter(Membership(2, (joiner.member, made[1].member)), 0)
        joiner.fabric.learn(((), ()))
        joiner.snapshots.only(2)
        joiner.snapshots.at_boundary(2)
        joiner.settled()
        joiner.ballot(torn=True)
        joiner.snapshots.voted(WriterStage.FAILED)

        assert made[1].snapshots._copy(back(0, 2)).digest == good
        joiner.close()


def test_a_joiner_with_other_gradient_buckets_does_not_take_the_copy() -> None:
    """The role of the rank says which ones it has."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 1)
        made[1].context.fit.roles.known = (Role("s", (0,), buckets="b"), Role("s", (1,)))
        joiner = Rank(9, Script(5))
        with pytest.raises(StateMismatch, match="other buckets here than on rank 0"):
            joiner.snapshots.fetch(back(0, 0, made[1].member), lambda: True)
        joiner.close()


def test_a_joiner_with_another_model_does_not_take_the_copy() -> None:
    with ranks([Script(1), Script(2)]) as made:
        train(made, 1)
        joiner = Rank(9, Script(5, build=normed))
        with pytest.raises(StateMismatch, match="differs from the job"):
            joiner.snapshots.fetch(back(0, 0, made[1].member), lambda: True)
        joiner.close()


def test_a_damaged_copy_is_never_restored() -> None:
    """One bit is flipped in the memory of the host."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 1)
        copy = made[0].snapshots._store.get(0, 0)
        assert isinstance(copy, StateCopy)
        copy.entries[1][1][0] ^= 1
        before = whole_digest(made[0].units, 0)
        with pytest.raises(StateMismatch, match="damaged"):
            made[0].snapshots.put_back(back(0, 0))

        assert whole_digest(made[0].units, 0) == before


def test_no_rank_returns_to_an_earlier_call() -> None:
    """Code between two ``batches()`` calls cannot be repeated."""
    with ranks([Script(1), Script(2)]) as made:
        train(made, 1)
        early = made[0].snapshots._store.get(0, 0)
        assert early is not None
        for rank in made:
            rank.snapshots.call_over(1)

        assert all(rank.kept == () for rank in made)
        assert not made[0].snapshots._store.put(early)


def test_an_unverified_state_is_not_stored() -> None:
    """It is copied meanwhile, and then brought to its keeper, or not."""
    with ranks([Script(1), Script(2)]) as made, linked() as (near, far):
        one, other = made
        source, joiner = StateVerification(), one.context.verification
        source.verify_joiner(back(0, 0), near, lambda: {"parameters": "there"})
        joiner.verify_own(back(0, 0), far, lambda: {"parameters": "here"})
        for rank in made:
            rank.snapshots.at_boundary(0)
        stages = [rank.settled() for rank in made]
        for rank in made:
            rank.snapshots.voted(min(stages))
            rank.apply()
        kept = one.kept, other.kept
        joiner.drop()
        train(made, 4)
        source.close()

        assert stages == [WriterStage.FAILED, WriterStage.DONE]
        assert kept == ((), ())
        assert Kept(0, 4) in other.kept

"""Each rank measures itself, reports in real votes, and judges itself by all reports."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from tests.fabric.circle import circle
from tmd.core.planning.stragglers import BLOCK
from tmd.core.values.model import Activity
from tmd.fabric.wait_timer import Waits
from tmd.testing.clients import worker_status
from tmd.trainer.protocol.step_vote import VoteKind, agree
from tmd.trainer.worker.pacing import UNKNOWN, Pacing

RANKS = 3


class FakeTimer:
    """Stands in for the wait timer: each step computes for a given time and waits for the rest."""

    def __init__(self):
        self.at = 0.0
        self.waited = 0.0

    def read(self):
        return Waits(self.at, self.waited, -1.0, 0.0, -1.0)

    def step(self, busy, wait):
        self.at += busy + wait
        self.waited += wait


class Rank:
    """One rank of a job, without its script."""

    def __init__(self, fabric, rank, replicas=tuple(range(RANKS)), ranks=RANKS):
        self.fabric = fabric
        self.timer = FakeTimer()
        self.pacing = Pacing(self.timer)  # type: ignore[arg-type]
        status = worker_status(f"h/job/{rank}.a", activity=Activity.TRAINING)
        self.status = structs.replace(
            status, world_size=ranks, rank=rank, epoch=1, replicas=replicas
        )
        self.random = random.Random(rank)
        self.report_sizes = []

    def run(self, steps, busy=0.4, step_s=0.6):
        pace = None
        for _ in range(steps):
            took = busy * self.random.lognormvariate(0.0, 0.03)
            self.pacing.begin()
            self.timer.step(took, step_s - took)
            shares = self.pacing.ballot(self.status)
            self.report_sizes.append(len(shares))
            _, told = agree(self.fabric, self.status.step, 0, VoteKind.STEPPING, shares)
            self.pacing.voted(self.status, told)
            pace = self.pacing.took(step_s)
            self.status = structs.replace(self.status, step=self.status.step + 1)
        return pace


@pytest.fixture
def job():
    with circle(RANKS) as c:
        yield [Rank(fabric, rank) for rank, fabric in enumerate(c.fabrics)], c


def run(job, steps, busy=(0.4,) * RANKS, step_s=0.6):
    ranks, c = job
    return c.each(lambda f: ranks[f.rank].run(steps, busy[f.rank], step_s))


def test_only_the_slow_rank_reports_that_it_is_slow(job):
    """All steps take equally long on all ranks: only the time without waits differs."""
    run(job, 200)
    paces = run(job, 60, busy=(0.4, 0.52, 0.4))

    assert [p.slow_since is not None for p in paces] == [False, True, False]
    assert paces[1].ratio == pytest.approx(1.3, rel=0.1)
    assert {p.step for p in paces} == {260}


def test_timings_are_sent_only_with_the_last_step_of_a_block(job):
    run(job, 2 * BLOCK + 5)

    for rank in job[0]:
        assert [n for n, length in enumerate(rank.report_sizes) if length] == [
            BLOCK - 1,
            2 * BLOCK - 1,
        ]


def test_a_new_epoch_resets_the_usual_timing(job):
    """Even in the middle of a block, whose first steps belong to another membership."""
    run(job, 200)
    run(job, 60, busy=(0.4, 0.52, 0.4))
    run(job, BLOCK // 2)
    for rank in job[0]:
        rank.status = structs.replace(rank.status, epoch=2)
    afterwards = run(job, BLOCK // 2)
    next_block = run(job, BLOCK)

    assert afterwards == [None] * RANKS
    assert [p.slow_since for p in next_block] == [None] * RANKS


def test_only_ranks_of_equal_state_are_compared():
    """Ranks 0 and 1 are replicas; rank 2 has no replica to compare with."""
    with circle(RANKS) as c:
        groups = ((0, 1), (0, 1), (2,))
        ranks = [Rank(f, r, groups[r]) for r, f in enumerate(c.fabrics)]
        job = ranks, c
        run(job, 200, busy=(0.4, 0.4, 4.0), step_s=5.0)
        paces = run(job, 60, busy=(0.4, 0.52, 4.0), step_s=5.0)

    assert paces[1].slow_since is not None
    assert paces[1].ratio == pytest.approx(1.3, rel=0.1)
    assert paces[2] is None


def test_a_slowdown_of_all_ranks_is_reported(job):
    run(job, 150)
    paces = run(job, 50, busy=(0.5,) * RANKS, step_s=0.9)

    assert all(p.group_slow for p in paces)
    assert all(p.slow_since is None for p in paces)


def test_a_rank_without_peers_reports_no_pace():
    with circle(1) as c:
        rank = Rank(c.fabrics[0], 0, (0,), ranks=1)
        pace = rank.run(3 * BLOCK)

    assert pace is None


def test_a_shadow_reports_no_pace_from_its_ranks_vote():
    """The timings in its rank's vote say nothing about the shadow."""
    pacing = Pacing(FakeTimer())  # type: ignore[arg-type]
    status = worker_status("h/job/0.a", activity=Activity.IN_STEP)
    status = structs.replace(status, world_size=RANKS, step=BLOCK - 1, replicas=())
    shares = pacing.ballot(status)
    pacing.voted(status, (400_000, 400_000, 400_000))

    assert shares == (UNKNOWN,) * RANKS
    assert pacing.took(0.5) is None


def test_the_vote_that_ends_a_call_carries_no_timings(job):
    """Not even at the last step of a block, where other votes carry them."""
    _, c = job
    run(job, BLOCK - 1)
    outcomes = c.each(lambda f: agree(f, BLOCK - 1, 0, VoteKind.CLOSING))

    assert outcomes == [(0, ())] * RANKS


def test_a_vote_with_timings_detects_ranks_at_different_steps():
    def vote(fabric):
        with pytest.raises(RuntimeError, match="different places"):
            agree(fabric, fabric.rank, 0, VoteKind.STEPPING, (UNKNOWN,) * RANKS)

    with circle(RANKS) as c:
        c.each(vote)

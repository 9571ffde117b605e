"""A standby that must be rebuilt for ranks that cannot be built on its host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fabric.fake_nccl import Cluster, FakeKind
from tests.trainer.workers import Worker, worker
from tmd.core.planning.directives import ShadowRank, Wait
from tmd.core.values.model import Member, Membership, Rehearsal
from tmd.fabric import GroupView
from tmd.fabric.generations.generations import Generations
from tmd.trainer.state.roles import Role
from tmd.trainer.state_transfer.obstacle import Rebuild
from tmd.trainer.worker.warmup import Warmup

ASKED = ShadowRank(rank=0, size=4, source=Member("w0", "h0", "a:1"), stay=False)


@contextmanager
def standby(folder: Path, **status: Any) -> Iterator[Worker]:
    """A standby built as rank 3 of four, most of which are like rank 0."""
    with worker(folder, several=True, **status) as made:
        roles = made.context.fit.roles
        roles.built = 3
        structures = ["wide", "wide", "wide", "narrow"]
        roles.known = tuple(Role(s, (r,)) for r, s in enumerate(structures))
        yield made


def warmup_by(build: Callable[[], None]) -> Warmup:
    warmup = Warmup()
    warmup.set_builder(build)
    return warmup


def test_a_failed_rebuild_for_a_rehearsal_keeps_the_standby(tmp_path: Path) -> None:
    """For a rehearsal no process ends: it is built again as it was before."""
    built: list[int | None] = []
    with standby(tmp_path) as made:

        def build() -> None:
            built.append(made.fabric.rank)
            if made.fabric.rank == 0:
                raise MemoryError("too wide")

        made.obey(ASKED)
        made.parts.pool.become(Rebuild(0), warmup_by(build))
        (verdict,) = made.status.rehearsed

        assert built == [0, 3]
        assert verdict.refusal == "cannot be built for rank 0 here: too wide"
        assert not made.parts.driver.attempts.wants(ASKED)


def test_a_failed_rebuild_for_a_plan_ends_the_process(tmp_path: Path) -> None:
    """Then the rank has to go to another standby: the process ends and says why."""

    def build() -> None:
        raise MemoryError

    with standby(tmp_path) as made:
        made.obey(Wait())
        with pytest.raises(MemoryError):
            made.parts.pool.become(Rebuild(0), warmup_by(build))

        assert made.status.rehearsed == ()


@pytest.mark.parametrize("refusal", ["", "cannot be built"])
def test_a_standby_does_not_settle_on_a_refused_rank(tmp_path: Path, refusal: str) -> None:
    verdict = Rehearsal(0, 0.0, refusal, role="wide", ranks=(0, 1, 2))
    with standby(tmp_path, rehearsed=(verdict,)) as made:
        made.obey(Wait())

        assert made.parts.pool.wait() == (None if refusal else Rebuild(2))


def test_a_standby_frees_the_groups_that_it_has_left(tmp_path: Path) -> None:
    """It commits no step, after which a rank frees them. Other members may use them till then."""
    cluster = Cluster()
    with standby(tmp_path) as made:
        made.fabric.pass_to(Generations(FakeKind(cluster, "w")))
        generations = made.fabric.generations
        generations.enter(Membership(1, (Member("w", "h", "h:1"),)))
        assert generations.of(GroupView("own", (0,))) is not None
        generations.leave()
        before = cluster.open
        made.obey(Wait())
        made.parts.pool.wait()

        assert (before, cluster.open) == (1, 0)
    cluster.end()

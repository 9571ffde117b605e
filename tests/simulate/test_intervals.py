"""How often each setup returns to a checkpoint, and so the interval that loses least."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.simulate.studies import COSTS, fault, played, study
from tmd.simulate.values import HOUR, Fault, FaultScope, RecoveryMethod, Warned

SAVING = structs.replace(COSTS, save_s=2.0)
"""A checkpoint each hour loses least if the job returns to one each 900 hours."""
LOSSES = [fault(100.001 * HOUR * n, place=4 - n) for n in range(1, 5)]
"""With standbys the job trains for all of the time but minutes."""


def every_s(
    method: RecoveryMethod,
    standbys: int,
    *faults: Fault,
    replica_hosts: int = 4,
    snapshot_steps: int = 0,
) -> float:
    """The time between checkpoints that is chosen for a job of four hosts and 900 hours."""
    asked = study(
        replica_hosts=replica_hosts, hours=900.0, costs=SAVING, snapshot_steps=snapshot_steps
    )
    asked = structs.replace(asked, checkpoint_every_s=None)
    return played(method, standbys, *faults, asked=asked).checkpoint_s


def test_a_fault_before_which_a_restart_saves_is_no_return_to_a_checkpoint() -> None:
    warned = [structs.replace(f, warned=Warned.FINDING) for f in LOSSES]
    bug = fault(500 * HOUR, scope=FaultScope.JOB)

    assert every_s(RecoveryMethod.RESTART, 4, *warned, bug) == pytest.approx(HOUR, rel=1e-3)
    assert every_s(RecoveryMethod.RESTART, 4, *LOSSES) == pytest.approx(HOUR / 2, rel=1e-3)


def test_the_loss_of_a_state_without_a_copy_is_a_return_to_a_checkpoint() -> None:
    """A replica, a snapshot and the hot standby of the lost rank have a copy."""
    warm, hot = RecoveryMethod.WARM, RecoveryMethod.HOT

    assert every_s(warm, 4, *LOSSES) == pytest.approx(HOUR / 2, rel=1e-3)
    assert every_s(warm, 4, *LOSSES, snapshot_steps=10) == pytest.approx(HOUR, rel=1e-3)
    assert every_s(warm, 4, *LOSSES, replica_hosts=1) == pytest.approx(HOUR, rel=1e-3)
    assert every_s(hot, 4, *LOSSES) == pytest.approx(HOUR, rel=1e-3)


def test_the_time_without_hosts_counts_no_more_than_the_faults_in_it() -> None:
    """The first fault repeats the work of 450 hours, and the job stands still ever after."""
    others = [fault((450 + n) * HOUR, place=n) for n in range(4)]

    found = every_s(RecoveryMethod.RESTART, 0, *others)

    assert found == pytest.approx(HOUR / 2**0.5, rel=1e-3)

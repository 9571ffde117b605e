"""What triage remembers of findings, and what it raises when one keeps coming back."""

from __future__ import annotations

import pytest

from tests.values import alert
from tmd.core.alerts.findings import (
    BANNED,
    DAY_S,
    TRIAGE,
    FindingKey,
    FindingMemory,
    FindingRules,
    Origin,
    Raise,
    ban,
    is_of_host,
)
from tmd.core.values.model import Severity, State, Strategy

KEY = FindingKey("h1", "nvml", "gpu:0", "nvml.ecc")


@pytest.mark.parametrize("field", FindingKey._fields)
def test_findings_that_differ_in_anything_are_counted_apart(field: str) -> None:
    """And what lies before the window is not counted."""
    other = KEY._replace(**{field: "other"})
    at = ((KEY, 1.0), (KEY, 5.0), (other, 6.0), (KEY, 9.0))
    memory = FindingMemory(tuple(Raise(key, when) for key, when in at))

    assert memory.times(KEY, 5.0) == 1
    assert memory.times(KEY, 0.0) == 3
    assert memory.times(other, 0.0) == 1
    assert FindingMemory().times(KEY, 0.0) == 0


@pytest.mark.parametrize("severity", Severity)
@pytest.mark.parametrize("job", ["", "job"])
def test_a_remark_and_what_is_about_a_worker_say_nothing_of_the_host(
    severity: Severity, job: str
) -> None:
    assert is_of_host(job, severity) is (job == "" and severity is not Severity.INFO)


def test_a_ban_names_the_finding_how_often_it_came_and_how_to_lift_it() -> None:
    """It is advice: no policy moves a rank because of it."""
    origin = Origin("h1", "nvml", Strategy.ACT, FindingRules(repeats=3, window_s=2 * DAY_S))
    cause = alert(code="nvml.ecc", entity="gpu:0")
    made = ban(origin, cause, 3, 77.0)

    assert (made.code, made.detector, made.entity, made.host) == (BANNED, TRIAGE, "host", "h1")
    assert (made.state, made.strategy) == (State.RAISED, Strategy.ADVISE)
    assert (made.id, made.at) == (f"{cause.id}-ban", 77.0)
    assert made.message == (
        "nvml.ecc of gpu:0 was raised 3 times within 2 days: "
        "no standby here is given a rank before 'tmd set-healthy h1'"
    )

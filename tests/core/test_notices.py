"""What people outside are told, and that it is told once."""

from __future__ import annotations

import json

from msgspec import structs

from tmd.core.model import (
    Alert,
    JobRecord,
    JobState,
    Kind,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    Severity,
    State,
    Strategy,
)
from tmd.core.notices import REMEMBERED, Told, of_alerts, of_migrations, payload

ALERT = Alert(
    id="h1-1",
    host="h1",
    detector="nic",
    code="nic.down",
    entity="nic:eth0",
    severity=Severity.DEGRADED,
    state=State.RAISED,
    message="no carrier <!channel> & more",
    job="",
    strategy=Strategy.OBSERVE,
    count=1,
    at=1.0,
)
MEMBERS = tuple(Member(f"h{n}/job/0.a", f"h{n}", "127.0.0.1:1") for n in (1, 2))


def record(*plans):
    membership = Membership(epoch=1, members=MEMBERS)
    return JobRecord("job", 2, JobState.RUNNING, membership, proposed=1, history=plans)


def plan(number, phase=Phase.DONE):
    membership = Membership(epoch=1, members=MEMBERS)
    return MigrationPlan(
        id=f"job-{number}",
        kind=Kind.PLANNED,
        phase=phase,
        moves=(Move(rank=0, leaver=MEMBERS[0], joiner=MEMBERS[1]),),
        old=membership,
        new=membership,
        cause="drain",
        reason="drain of h1 requested",
    )


def test_the_payload_is_one_for_slack_and_for_programs():
    """Text that a detector took from the host cannot call a whole channel."""
    (notice,) = of_alerts([ALERT])
    said = json.loads(payload(notice, "west"))

    assert said["text"].startswith("[west] degraded: nic.down on h1, nic:eth0: no carrier &lt;!")
    assert "<" not in said["text"]
    assert said["tmd"]["alert"]["message"] == ALERT.message
    assert (said["tmd"]["v"], said["tmd"]["cluster"]) == (1, "west")


def test_only_migrations_that_have_ended_are_told():
    notices = of_migrations([record(plan(1), plan(2, Phase.ABORTED), plan(3, Phase.PREPARE))])

    assert [n.text for n in notices] == [
        "migration job-1 done: rank 0 from h1 to h2 (drain of h1 requested)",
        "migration job-2 given up: rank 0 from h1 to h2 (drain of h1 requested)",
    ]


def test_each_word_about_a_finding_is_told_once():
    worse = structs.replace(ALERT, severity=Severity.FATAL)
    over = structs.replace(ALERT, state=State.CLEARED)
    first = of_alerts([ALERT])
    told = Told().plus(first, "7")

    assert told.untold(of_alerts([ALERT, worse, over])) == of_alerts([worse, over])
    assert told.cursor == "7"


def test_a_migration_that_the_records_show_is_never_told_again():
    """However many there are; those that are shown no more are forgotten some time."""
    many = of_migrations([record(*(plan(n) for n in range(3 * REMEMBERED)))])
    shown = [n.id for n in many]
    told = Told().plus(many, "", shown)
    after = told.plus([], "", shown[:5])

    assert told.untold(many) == []
    assert after.untold(many[:5]) == []
    assert len(after.migrations) == REMEMBERED + 5

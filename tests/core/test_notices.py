"""Which notices are announced, and that none is announced again."""

from __future__ import annotations

import json

from msgspec import structs

from tests import values
from tests.values import alert, member
from tmd.core.alerts.notices import REMEMBERED, Announced, of_alerts, of_migrations, payload
from tmd.core.values.model import Move, Phase, Severity, State

ALERT = alert(
    code="nic.down",
    entity="nic:eth0",
    severity=Severity.DEGRADED,
    message="no carrier <!channel> & more",
)


def record(*plans):
    return values.record("h1", "h2", history=plans)


def plan(number, phase=Phase.DONE):
    return values.plan(
        record().membership,
        id=f"job-{number}",
        phase=phase,
        moves=(Move(rank=0, leaver=member("h1"), joiner=member("h2")),),
        reason="drain of h1 requested",
    )


def test_one_payload_serves_slack_and_programs():
    """Slack gets escaped text, so that what a detector took from the host cannot notify a channel;
    programs get the message unchanged."""
    (notice,) = of_alerts([ALERT])
    message = json.loads(payload(notice, "west"))

    assert message["text"].startswith("[west] degraded: nic.down on h1, nic:eth0: no carrier &lt;!")
    assert "<" not in message["text"]
    assert message["tmd"]["alert"]["message"] == ALERT.message
    assert (message["tmd"]["v"], message["tmd"]["cluster"]) == (1, "west")


def test_only_finished_migrations_are_announced():
    notices = of_migrations([record(plan(1), plan(2, Phase.ABORTED), plan(3, Phase.PREPARE))])

    assert [n.text for n in notices] == [
        "migration job-1 done: rank 0 from h1 to h2 (drain of h1 requested)",
        "migration job-2 given up: rank 0 from h1 to h2 (drain of h1 requested)",
    ]


def test_each_change_of_a_finding_is_announced_once():
    worse = structs.replace(ALERT, severity=Severity.FATAL)
    over = structs.replace(ALERT, state=State.CLEARED)
    first = of_alerts([ALERT])
    announced = Announced().plus(first, "7")

    assert announced.unannounced(of_alerts([ALERT, worse, over])) == of_alerts([worse, over])
    assert announced.cursor == "7"


def test_a_migration_in_the_records_is_never_announced_again():
    """However many there are. Of those no longer in a record the latest are remembered."""
    many = of_migrations([record(*(plan(n) for n in range(3 * REMEMBERED)))])
    shown = [n.id for n in many]
    announced = Announced().plus(many, "", shown)
    after = announced.plus([], "", shown[:5])

    assert announced.unannounced(many) == []
    assert after.unannounced(many[:5]) == []
    assert len(after.migrations) == REMEMBERED + 5

"""Notices that leave the cluster, and which of them were sent.

Pure: the notifier keeps :class:`Announced` in the store, so the next leader continues from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import msgspec
from msgspec import Struct, structs

from tmd.core.values.model import FINAL, Alert, JobRecord, MigrationPlan, Phase, State

REMEMBERED = 1000
VERSION = 1


class Notice(Struct, frozen=True):
    """One notice. A repeated delivery has the same ``id``."""

    id: str
    text: str
    job: str = ""
    alert: Alert | None = None
    migration: MigrationPlan | None = None

    @property
    def at(self) -> float:
        """When it happened (wall clock)."""
        if self.alert is not None:
            return max(self.alert.at, self.alert.reached_at)
        timeline = () if self.migration is None else self.migration.timeline
        return timeline[-1].at if timeline else inf


class Announced(Struct, frozen=True):
    """Notices that were sent before."""

    cursor: str = ""
    """Position in the alert stream: earlier alerts were announced."""
    alerts: tuple[str, ...] = ()
    """Ids of the latest alert notices: an emptied store may show them again."""
    migrations: tuple[str, ...] = ()
    """Ids of announced migrations that records may still show."""

    def plus(self, notices: Iterable[Notice], cursor: str, shown: Iterable[str] = ()) -> Announced:
        """Add ``notices`` and alerts up to ``cursor``; ``shown`` are the ids of the migrations in
        the current records, which are never forgotten."""
        alerts = dict.fromkeys(self.alerts)
        migrations = dict.fromkeys(self.migrations)
        for notice in notices:
            (alerts if notice.alert else migrations)[notice.id] = None
        here = set(shown)
        gone = [known for known in migrations if known not in here]
        for old in gone[:-REMEMBERED]:
            del migrations[old]
        return Announced(
            cursor=cursor,
            alerts=tuple(alerts)[-REMEMBERED:],
            migrations=tuple(migrations),
        )

    def unannounced(self, notices: Sequence[Notice]) -> list[Notice]:
        known = {*self.alerts, *self.migrations}
        return [notice for notice in notices if notice.id not in known]


def of_alerts(alerts: Iterable[Alert]) -> list[Notice]:
    return [Notice(id=mark(a), text=_alert_text(a), job=a.job, alert=a) for a in alerts]


def of_migrations(jobs: Iterable[JobRecord]) -> list[Notice]:
    """All finished migrations in the records, oldest first for each job."""
    return [
        Notice(id=f"{record.job}/{plan.id}", text=_plan_text(plan), job=record.job, migration=plan)
        for record in jobs
        for plan in record.history
        if plan.phase in FINAL
    ]


def payload(notice: Notice, cluster: str) -> bytes:
    """JSON whose ``text`` Slack's incoming webhooks show; programs read ``tmd``."""
    fields = {"v": VERSION, "cluster": cluster, **structs.asdict(notice)}
    fields = {key: value for key, value in fields.items() if value is not None and key != "text"}
    text = _escaped(f"[{cluster}] {notice.text}")
    return msgspec.json.encode({"text": text, "tmd": fields})


def _alert_text(alert: Alert) -> str:
    word = "cleared" if alert.state is State.CLEARED else alert.severity.value
    text = f"{word}: {alert.code} on {alert.host}, {alert.entity}"
    return f"{text}: {alert.message}" if alert.message else text


def _plan_text(plan: MigrationPlan) -> str:
    word = "done" if plan.phase is Phase.DONE else "given up"
    moves = ", ".join(
        f"rank {m.rank} from {m.leaver.host} to {plan.taker_of(m) or 'nobody'}" for m in plan.moves
    )
    text = f"migration {plan.id} {word}: {moves or 'no rank moved'}"
    back = "" if plan.rollback is None else plan.rollback.sentence
    why = "; ".join(filter(None, (plan.outcome or plan.reason, back)))
    return f"{text} ({why})" if why else text


def _escaped(text: str) -> str:
    # In Slack <...> is a link or notifies everybody: a detector's text must do neither.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def mark(alert: Alert) -> str:
    """A mark that is equal for a repeated delivery and differs for each change of a finding.

    A finding keeps its id from raise to clear and may get worse in between, so the id alone does
    not suffice.
    """
    return f"{alert.id}/{alert.state.value}/{alert.severity.value}/{alert.count}"

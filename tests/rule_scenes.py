"""What daemons report over time, as input for 'promtool test rules'.

Each series is taken from the text of ``/metrics``, so a rule is never tried on one that no daemon
shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.daemon.scraped import FAULT, OPEN_METRICS, RECORD, cluster, host, local
from tests.values import alert, failover, member, plan, worker
from tmd.core.alerts.store_health import StoreLoop, StoreState
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.checkpoints import MissedCheckpoint
from tmd.core.values.model import ClusterView, JobState, Move, Phase, Severity
from tmd.daemon.counters import JobCounter
from tmd.daemon.web.metrics import exposition
from tmd.daemon.web.parts import Local

STEP_S = 30
MINUTE = 2
"""Scrapes in a minute."""
Scene = dict[str, Any]
Reports = Iterable[Local | None]
"""What a daemon reports at each scrape; ``None`` while it does not answer."""
JOB = {"tmd_cluster": "c", "training_job": "job"}
ALONE = cluster(hosts=cluster().hosts[:2])
"""No standby is left."""


def every_scene() -> list[Scene]:
    """All of them, with what must be raised and what must not."""

    async def built() -> list[Scene]:
        return [
            _quiet(),
            _a_leader_is_lost(),
            _a_daemon_stops(),
            _a_job_holds(),
            _the_first_loss(),
            _a_job_fails(),
            _a_job_fails_again(),
            _a_failed_job_is_first_seen(),
            _findings(),
            _migrations_are_aborted(),
            _what_an_operator_must_see(),
            _two_versions(),
        ]

    return asyncio.run(built())


# --- series ---------------------------------------------------------------------------------------


def _series(targets: Mapping[str, Reports]) -> list[dict[str, str]]:
    """All series of ``targets`` (by instance), as Prometheus stores them."""
    found: dict[str, list[str]] = {}
    for instance, reports in targets.items():
        own = f'instance="{instance}",job="tmd"'
        shown: set[str] = set()
        before, samples = None, {}
        for number, report in enumerate(reports):
            values = {f"up{{{own}}}": "0" if report is None else "1"}
            if report is not None:
                # The same one again is not read again: that takes most of the time.
                samples = samples if report is before else _samples(report, own)
                values |= samples
            before = report
            for name in shown - values.keys():
                found[name] += ["_"] * (number - len(found[name])) + ["stale"]
            for name, value in values.items():
                past = found.setdefault(name, [])
                past += ["_"] * (number - len(past)) + [value]
            shown = set(values)
    return [{"series": name, "values": " ".join(values)} for name, values in found.items()]


def _samples(report: Local, own: str) -> dict[str, str]:
    text = exposition(report, OPEN_METRICS)[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [own, *(f'{name}="{value}"' for name, value in sample.labels.items())]
            found[f"{sample.name}{{{','.join(labels)}}}"] = repr(sample.value)
    return found


def _scene(name: str, targets: Mapping[str, Reports], *cases: Scene, more: Any = ()) -> Scene:
    series = [*_series(targets), *more]
    tests = {"interval": f"{STEP_S}s", "input_series": series, "alert_rule_test": list(cases)}
    return {"name": name, **tests}


def _case(minutes: int, rule: str, summary: str = "", **labels: str) -> Scene:
    """At that time ``rule`` fires with this text and these labels; without a text it does not."""
    case: Scene = {"eval_time": f"{minutes}m", "alertname": rule}
    if summary:
        case["exp_alerts"] = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]
    return case


def _always(report: Local, minutes: int) -> Iterator[Local]:
    return (report for _ in range(minutes * MINUTE))


def _counter() -> JobCounter:
    counter = JobCounter()
    counter.keep({"job"}, now=0.0)
    return counter


def _recovering() -> Any:
    vacant = structs.replace(failover(RECORD, worker("h2")), moves=(Move(1, member("h2")),))
    return structs.replace(RECORD, plan=vacant)


def _aborts(counter: JobCounter) -> None:
    begun = plan(RECORD.membership, phase=Phase.PREPARE)
    aborted = structs.replace(begun, phase=Phase.ABORTED)
    before = structs.replace(RECORD, plan=begun)
    counter.wrote(before, structs.replace(RECORD, plan=aborted), cluster())


# --- scenes ---------------------------------------------------------------------------------------


def _quiet() -> Scene:
    """A warning, a missed checkpoint, an aborted migration, and 1 % of the time lost."""
    rules = (
        *("TmdHostSilent", "TmdStoreUnreachable", "TmdNoLeader", "TmdHostUnreadable"),
        *("TmdVersionsDiffer", "TmdFindingFatal", "TmdFindingDegraded", "TmdBreakerOpen"),
        *("TmdPaused", "TmdJobHolds", "TmdJobFailed", "TmdJobUnprotected"),
        *("TmdCheckpointsMissed", "TmdMigrationsAborted", "TmdGoodputLost"),
    )
    slow = alert(code="nic.slow", severity=Severity.WARNING)
    missed = host("h5", missed=MissedCheckpoint(20, "No space left", 1))
    view = cluster(hosts=(*cluster().hosts, missed))
    counter = _counter()
    recovers = structs.replace(_recovering(), plan=failover(RECORD, worker("h2")))

    def led() -> Iterator[Local]:
        for number in range(65 * MINUTE):
            counter.look(recovers, view, number * STEP_S)
            counter.look(RECORD, view, number * STEP_S + 0.3)
            if number == MINUTE:
                _aborts(counter)
            yield local(host("h1", alerts=(slow,)), view=view, jobs=counter)

    targets = {"h1": led(), "h2": _always(local(host("h2"), jobs=_counter()), 65)}
    return _scene("a quiet cluster", targets, *(_case(64, rule) for rule in rules))


def _a_leader_is_lost() -> Scene:
    led = {name: structs.replace(local(view=cluster()), cluster=name) for name in ("a", "b")}
    lost = structs.replace(local(), cluster="b")
    reports = [*_always(led["b"], 5), *_always(lost, 10)]
    summary = "cluster b has no leader: nothing is decided"
    return _scene(
        "two clusters, of which one loses its leader",
        {"h1": _always(led["a"], 15), "h2": reports},
        _case(8, "TmdNoLeader", summary, tmd_cluster="b", severity="critical"),
    )


def _a_daemon_stops() -> Scene:
    reports = [*_always(local(), 3), *[None] * (10 * MINUTE)]
    other = {"series": 'up{instance="h1",job="node"}', "values": "0x25"}
    labels = {"instance": "h1", "job": "tmd", "severity": "warning"}
    return _scene(
        "a daemon stops, and another program on its host was never there",
        {"h1": reports},
        _case(8, "TmdHostSilent", "h1: the daemon of tmd does not answer", **labels),
        more=[other],
    )


def _a_job_holds() -> Scene:
    """From the 61st minute on."""
    counter = _counter()

    def led() -> Iterator[Local]:
        yield from _always(local(view=cluster(), jobs=counter), 61)
        for number in range(61 * MINUTE, 75 * MINUTE):
            counter.look(_recovering(), ClusterView(), number * STEP_S)
            yield local(view=ALONE, jobs=counter)

    holds = "job job stands still: no standby can take a lost rank, or the cluster is paused"
    bare = "job job: no standby could take 2 ranks"
    return _scene(
        "a job holds for a standby",
        {"h1": led()},
        _case(60, "TmdJobHolds"),
        _case(65, "TmdJobHolds", holds, **JOB, severity="critical"),
        _case(67, "TmdGoodputLost", "job job lost 10% of an hour", **JOB, severity="warning"),
        _case(73, "TmdJobUnprotected", bare, **JOB, severity="warning"),
    )


def _the_first_loss() -> Scene:
    """Nothing was counted before. Its leader had never led, and counts it in its first turn."""
    counters = {name: _counter() for name in ("h1", "h2")}
    stood = cluster(hosts=(host("h1", stands_s=200.0),))

    def led() -> Iterator[Local]:
        yield from _always(local(host("h2"), jobs=counters["h2"]), 70)
        counters["h2"].wrote(RECORD, _recovering(), stood)
        for _ in range(4):
            _aborts(counters["h2"])
        yield from _always(local(host("h2"), view=cluster(), jobs=counters["h2"]), 5)

    first = local(view=cluster(), jobs=counters["h1"])
    reports = [*_always(first, 70), *[None] * (5 * MINUTE)]
    lost = "job job lost 5.556% of an hour"
    aborted = "4 migrations of kind planned were aborted in an hour"
    return _scene(
        "the first loss, and a leader that leads for the first time",
        {"h1": reports, "h2": led()},
        _case(69, "TmdGoodputLost"),
        _case(72, "TmdGoodputLost", lost, **JOB, severity="warning"),
        _case(
            72, "TmdMigrationsAborted", aborted, tmd_cluster="c", kind="planned", severity="warning"
        ),
    )


def _a_job_fails() -> Scene:
    failed = cluster(jobs=(structs.replace(RECORD, state=JobState.FAILED),))
    reports = [*_always(local(view=cluster()), 10), *_always(local(view=failed), 140)]
    return _scene(
        "a job fails, and its record stays",
        {"h1": reports},
        _case(9, "TmdJobFailed"),
        _case(20, "TmdJobFailed", "job job has failed", **JOB, severity="critical"),
        _case(90, "TmdJobFailed"),
    )


def _a_failed_job_is_first_seen() -> Scene:
    """It failed before it was ever scraped, or while Prometheus was away."""
    failed = cluster(jobs=(structs.replace(RECORD, state=JobState.FAILED),))
    reports = [*[None] * (10 * MINUTE), *_always(local(view=failed), 100)]
    return _scene(
        "a failed job is first seen",
        {"h1": reports},
        _case(20, "TmdJobFailed", "job job has failed", **JOB, severity="critical"),
        _case(90, "TmdJobFailed"),
    )


def _a_job_fails_again() -> Scene:
    """Within an hour after the first failure, of which somebody had started it again."""
    failed = cluster(jobs=(structs.replace(RECORD, state=JobState.FAILED),))
    states = ((10, False), (50, True), (15, False), (25, True), (25, False))
    reports = (
        report
        for minutes, fails in states
        for report in _always(local(view=failed if fails else cluster()), minutes)
    )
    shown = ("TmdJobFailed", "job job has failed")
    return _scene(
        "a job fails twice",
        {"h1": reports},
        _case(40, *shown, **JOB, severity="critical"),
        _case(70, "TmdJobFailed"),
        _case(80, *shown, **JOB, severity="critical"),
        _case(105, "TmdJobFailed"),
    )


def _findings() -> Scene:
    flap = alert(code="nic.flap", severity=Severity.DEGRADED)
    reports = _always(local(host("h1", alerts=(FAULT, flap))), 20)
    where = {"instance": "h1", "job": "tmd", "host": "h1"}
    fatal = {**where, "code": "nvml.ecc", "severity": "critical"}
    degraded = {**where, "code": "nic.flap", "severity": "warning"}
    return _scene(
        "findings count by their severity",
        {"h1": reports},
        _case(5, "TmdFindingFatal", "h1: nvml.ecc is fatal", **fatal),
        _case(15, "TmdFindingDegraded", "h1: nic.flap is degraded", **degraded),
    )


def _migrations_are_aborted() -> Scene:
    """Three by each of two leaders, which is few for one."""

    def led(name: str, minutes: int) -> Iterator[Local]:
        counter = _counter()
        yield from _always(local(host(name), view=cluster(), jobs=counter), minutes)
        for _ in range(3):
            _aborts(counter)
        yield from _always(local(host(name), view=cluster(), jobs=counter), 70 - minutes)

    labels = {"tmd_cluster": "c", "kind": "planned", "severity": "warning"}
    text = "6 migrations of kind planned were aborted in an hour"
    return _scene(
        "migrations of two leaders are added up",
        {"h1": led("h1", 20), "h2": led("h2", 40)},
        _case(30, "TmdMigrationsAborted"),
        _case(65, "TmdMigrationsAborted", text, **labels),
    )


def _what_an_operator_must_see() -> Scene:
    missed = host("h5", missed=MissedCheckpoint(20, "No space left", 2))
    view = cluster(
        hosts=(*cluster().hosts, missed),
        paused=True,
        breaker=Breaker(open=True),
        unread=("h9",),
        unread_jobs=("other",),
    )
    failing = StoreState(failing={StoreLoop.HEARTBEAT: "out of memory"}, written=True)
    where = {"instance": "h1", "job": "tmd"}
    warning = {"tmd_cluster": "c", "severity": "warning"}
    unreadable = "2 hosts or jobs use a version of tmd that the leader cannot read"
    breaker = "the breaker is open: policies move no rank"
    paused = "an operator has held new migrations back for an hour"
    checkpoints = "job job: 2 checkpoints in a row failed"
    store = "h1: Redis does not serve the daemon"
    return _scene(
        "a paused cluster with an open breaker and more",
        {"h1": _always(local(view=view, store=failing), 70)},
        _case(2, "TmdStoreUnreachable", store, **where, severity="warning"),
        _case(2, "TmdBreakerOpen", breaker, **where, tmd_cluster="c", severity="critical"),
        _case(2, "TmdCheckpointsMissed", checkpoints, **JOB, severity="warning"),
        _case(12, "TmdHostUnreadable", unreadable, **where, **warning),
        _case(65, "TmdPaused", paused, **where, **warning),
    )


def _two_versions() -> Scene:
    """A day long; the text of a daemon has only the version that it is."""
    day = 25 * 60
    targets = {name: _always(local(host(name)), 1) for name in ("h1", "h2", "h3")}
    shown = [s for s in _series(targets) if "_info{" in s["series"]]
    for entry in shown:
        entry["values"] = f"{entry['values'].split()[0]}x{day * MINUTE}"
        if entry["series"].startswith("tmd_build_info") and 'instance="h3"' in entry["series"]:
            entry["series"] = entry["series"].replace('version="', 'version="0')
    summary = "the hosts of c have run 2 versions of tmd for a day"
    return _scene(
        "an upgrade that nobody finishes",
        {},
        _case(23 * 60, "TmdVersionsDiffer"),
        _case(day - 1, "TmdVersionsDiffer", summary, tmd_cluster="c", severity="warning"),
        more=shown,
    )

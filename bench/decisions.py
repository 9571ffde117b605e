"""What a decision takes in a job of 1,024 and of 16,384 ranks, and how large its record is.

``at rest``: the record without a live plan; ``in a move``: with a failover. All hosts of a job read
what each revision changes in its record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import structs
from tmd_policies.replace_failed import ReplaceFailed

from bench.fleet_hosts import SPARE, WORKERS, jobs_of, starting, status
from bench.measure import Report, each, options, parsed
from tmd.core.planning.directives import directive_of
from tmd.core.planning.forming import form
from tmd.core.planning.planning import steer
from tmd.core.planning.readiness import unprotected
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import ClusterView, JobRecord
from tmd.daemon.record_changes import applied, difference

RANKS = (1_024, 16_384)
ROWS = {
    "form": "form the job",
    "policy": "ask replace_failed about a lost worker",
    "steer": "open the failover",
    "gap": "look whether a standby covers each rank",
    "directive": "a worker's directive",
    "encode": "encode the record in a move",
    "change": "find what the next revision changes in it",
    "apply": "apply that change",
    "decode": "decode it",
    "rest_mb": "record at rest, MB",
    "move_mb": "record in a move, MB",
    "change_kb": "change that opens the failover, kB",
}


def measured(ranks: int) -> dict[str, float]:
    """Seconds of CPU of each decision, and megabytes."""
    hosts = ranks // WORKERS + SPARE
    (job,) = jobs_of(hosts, hosts)
    found: dict[str, float] = {}

    def timed(key: str, act: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = act()
        found[key] = time.process_time() - began
        return result

    first = ClusterView(hosts=tuple(starting(job, n) for n in range(hosts)))
    first.host("")  # builds the index of the view
    record = timed("form", lambda: form(first, job.name))
    reports = tuple(status(job, n, 5, dead=n == 1) for n in range(hosts))
    view = ClusterView(hosts=reports, jobs=(record,))
    view.host("")
    verdicts = timed("policy", lambda: ReplaceFailed().decide(view))
    limits = PlanLimits()
    after = timed("steer", lambda: steer(record, view, verdicts, now=0.0, age=0.0, limits=limits))
    timed("gap", lambda: unprotected(view, record))
    timed("directive", lambda: directive_of(after, record.membership.members[-1].worker))
    text = timed("encode", lambda: msgspec.json.encode(after))
    later = msgspec.json.encode(structs.replace(after, revision=99, detail="waiting"))
    change = timed("change", lambda: difference(text, later))
    timed("apply", lambda: applied(text, change))
    timed("decode", lambda: msgspec.json.decode(text, type=JobRecord))
    found["move_mb"] = len(text) / 1e6
    found["rest_mb"] = len(msgspec.json.encode(structs.replace(after, plan=None))) / 1e6
    opening = difference(msgspec.json.encode(record), text)
    assert opening is not None
    found["change_kb"] = len(opening) / 1e3
    return found


def main() -> int:
    args = parsed(options("decisions", __doc__, repeats=9))
    sizes, repeats = (RANKS[:1], 1) if args.quick else (RANKS, args.repeats)
    report = Report("decisions", args)
    runs = {str(ranks): [measured(ranks) for _ in range(repeats)] for ranks in sizes}
    figures: dict[str, Any] = {}
    for ranks, found in runs.items():
        figures[ranks] = {key: each(found, key) for key in ROWS}
        for key, what in ROWS.items():
            report.row(f"{ranks} ranks: {what}", figures[ranks][key])
    return report.finish(runs, figures)


if __name__ == "__main__":
    raise SystemExit(main())

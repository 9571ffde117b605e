"""What it costs that Redis is away: the demo's job with four ranks, before, during and after.

Redis is killed and comes back empty. Meanwhile checks of the hosts fail and recover; each finding
must be published exactly once, by its id. A figure is the median time between commits of rank 0.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import rivals
from bench.measure import Report, options, parsed, summary
from bench.steady import RANKS, TINY
from tmd.campaign.servers import Private
from tmd.core.values.model import Alert, State
from tmd.demo import train
from tmd.demo.cluster import ClusterSpec, LocalCluster, ready

ENDLESS = 1_000_000
LIMIT = 1.05
GROWTH_MB = 2.0
WITHIN_S = 120.0
CONFIG = """
[[detectors.exec.checks]]
name = "bench"
command = ["/bin/sh", "-c", "test ! -e {flag}"]
every_s = 1.0
"""


class Trial:
    """One run: what was seen of it."""

    def __init__(self, folder: Path, redis: Private, cluster: LocalCluster) -> None:
        self.flag = folder / "flag"
        self.redis, self.cluster = redis, cluster
        self.marks: list[float] = []
        self.rounds = 0

    async def go(self, args: argparse.Namespace) -> dict[str, Any]:
        """Train, be alone for ``away`` seconds, train."""
        around = args.away / 2
        await self.cluster.until(lambda v: ready(v, len(RANKS), 0, 5), "the job trains", WITHIN_S)
        await self._passes(around)
        before = self._resident_mb()
        self._mark()
        self.redis.stop()
        await self._findings(args.away)
        self._mark()
        alone = self._resident_mb()
        self.redis.start()
        await self._all_published()
        self._mark()
        await self._passes(around)
        self._mark()
        published = Counter(_name(alert) for alert in await self._alerts())
        return {
            "marks": self.marks,
            "resident_mb": [before, alone, self._resident_mb()],
            "findings": len(RANKS) * self.rounds,
            "published": dict(published),
        }

    def _mark(self) -> None:
        self.marks.append(time.time())

    async def _passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _findings(self, seconds: float) -> None:
        """A check of every host fails and recovers, again and again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.flag.touch()
            await self._passes(5.0)
            self.flag.unlink()
            await self._passes(5.0)
            self.rounds += 1

    async def _all_published(self) -> None:
        """Wait until every raise and clearing has been published, or it is too late."""
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            with suppress(Exception):  # Redis has just come back
                if len(await self._alerts()) >= 2 * len(RANKS) * self.rounds:
                    return
            await self._passes(0.5)

    async def _alerts(self) -> list[Alert]:
        return [alert for alert in await self.cluster.alerts() if alert.detector == "exec"]

    def _resident_mb(self) -> float:
        total = 0
        for daemon in self.cluster.daemons.values():
            for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS"):
                    total += int(line.split()[1])
        return total / 1024


def _name(alert: Alert) -> str:
    return f"{alert.id} {State(alert.state)}"


async def run(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[rivals.Line]]:
    """What one trial has shown, and the trace of its job."""
    script = (train.__file__, "--steps", str(ENDLESS), *(TINY if args.quick else ()))
    with Private(folder / "redis") as redis:
        spec = ClusterSpec(
            *(folder, redis.url, "bench", RANKS, (), script),
            more_config=CONFIG.format(flag=folder / "flag"),
        )
        async with LocalCluster(spec) as cluster:
            seen = await Trial(folder, redis, cluster).go(args)
    return seen, rivals.read(cluster.trace)


def steps(lines: list[rivals.Line], since: float, until: float) -> list[float]:
    """Times between commits of rank 0 in that time."""
    at = [x["at"] for x in lines if x["rank"] == 0 and since <= x["at"] < until]
    return [b - a for a, b in pairwise(at)]


def tell(report: Report, found: tuple[dict[str, Any], list[rivals.Line]]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    seen, lines = found
    away, back, quiet, end = seen["marks"]
    parts = {
        "before": summary(steps(lines, away - (back - away) / 2, away)),
        "away": summary(steps(lines, away, back)),
        "after": summary(steps(lines, quiet, end)),
    }
    for name, figure in parts.items():
        report.row(f"step, Redis {name}", figure)
    around = (parts["before"]["median"] + parts["after"]["median"]) / 2
    ratio = parts["away"]["median"] / around
    report.target(f"step while away / around it <= {LIMIT}", ratio, LIMIT, at_least=False)
    before, alone, _ = seen["resident_mb"]
    grown = (alone - before) / len(RANKS)
    report.target(f"growth of a daemon <= {GROWTH_MB} MB", grown, GROWTH_MB, at_least=False)
    published = seen["published"]
    wrong = sum(n != 1 for n in published.values()) + abs(2 * seen["findings"] - len(published))
    report.target("findings not published exactly once <= 0", float(wrong), 0.0, at_least=False)
    return {**parts, "ratio": ratio, "growth_mb": grown, "not once": wrong}


def main() -> int:
    parser = options("away", __doc__, repeats=1)
    parser.add_argument("--away", type=float, default=300.0, help="seconds without Redis")
    args = parsed(parser)
    if args.quick:
        args.repeats, args.away = 1, 20.0
    report = Report("away", args)
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        found = report.attempt("away", lambda: asyncio.run(run(Path(scratch), args)))
    if found is None:
        return report.finish({}, {})
    return report.finish({"away": found[0]}, tell(report, found))


if __name__ == "__main__":
    raise SystemExit(main())

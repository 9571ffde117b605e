"""A third-party detector and policy: ranks leave overloaded hosts."""

import os

from tmd.plugin import (
    Detector,
    DetectorConfig,
    Policy,
    Severity,
    Signal,
    State,
    Strategy,
    Urgency,
    Verdict,
)


class LoadConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    limit: float = 100.0


class LoadDetector(Detector):
    name = "load"
    Config = LoadConfig

    async def watch(self, ctx):
        known = State.CLEARED
        while True:
            high = os.getloadavg()[0] > ctx.config.limit
            state = State.RAISED if high else State.CLEARED
            if state is not known:
                yield Signal("load.high", "host", Severity.DEGRADED, state, "too much to do")
            known = state
            await ctx.sleep(15.0)


class DrainOverloaded(Policy):
    name = "drain_overloaded"

    def decide(self, view):
        alerts = [a for h in view.hosts for a in h.alerts if a.strategy is Strategy.ACT]
        full = {a.host for a in alerts if a.code == "load.high"}
        return [
            Verdict(j.job, m.worker, Urgency.DRAIN, "load.high", f"{m.host} has too much to do")
            for j in view.jobs
            for m in j.membership.members
            if m.host in full
        ]

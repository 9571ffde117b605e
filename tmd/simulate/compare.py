"""Plays the same trace against each of several setups."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from tmd.config import Settings
from tmd.daemon.plugins import load_policies
from tmd.simulate.advice import checkpoint_every_s
from tmd.simulate.cluster import OperatorRules, SimulatedCluster
from tmd.simulate.costs import Costs
from tmd.simulate.engine import LossHandling, between_returns_s, run
from tmd.simulate.ledger import TrainingPace
from tmd.simulate.restarting import Restarting
from tmd.simulate.shrinking import Shrinking
from tmd.simulate.standing_by import StandingBy
from tmd.simulate.values import (
    Fault,
    FaultScope,
    Job,
    Outcome,
    RecoveryMethod,
    RecoverySetup,
    Warned,
)

DRAIN_POLICY = "drain_degraded"
"""The policy that moves ranks off a host before it fails."""


class Study(Struct, frozen=True):
    """What all compared setups share."""

    job: Job
    costs: Costs
    rules: OperatorRules
    checkpoint_every_s: float | None = None
    """Training time between checkpoints, 0 for none; ``None``: what loses least, for each setup."""
    snapshot_steps: int = 10
    """Steps between two snapshots where a state exists once; 0 for none."""


def rules_of(settings: Settings, *, announced: bool) -> OperatorRules:
    """Policies and limits as configured. With ``announced`` faults degraded hosts are left, too.
    The job holds for as long as it must, so that its length is that of the trace.

    Raises:
        ConfigError: a policy is not installed.
    """
    enabled = settings.policies.enabled
    if announced and DRAIN_POLICY not in enabled:
        policies = structs.replace(settings.policies, enabled=(*enabled, DRAIN_POLICY))
        settings = structs.replace(settings, policies=policies)
    limits = structs.replace(settings.limits.limits(), hold_s=0.0)
    return OperatorRules(load_policies(settings), settings.breaker.rules(), limits)


def setups(methods: Sequence[RecoveryMethod], standbys: int) -> list[RecoverySetup]:
    """Each method with 0 to ``standbys`` standbys; hot ones begin at 1."""
    least = {RecoveryMethod.HOT: 1}
    return [RecoverySetup(m, n) for m in methods for n in range(least.get(m, 0), standbys + 1)]


def outcome(study: Study, trace: Sequence[Fault], setup: RecoverySetup) -> Outcome:
    """The outcome of one setup."""
    job, rejoin_s = study.job, study.costs.rejoin_s
    places = job.hosts + setup.standbys
    seen = [f for f in trace if f.scope is FaultScope.JOB or f.place < places]
    pace = _pace(study, setup)
    every_s = study.checkpoint_every_s
    if every_s is None:
        # How often a setup returns to a checkpoint is not known before it is played.
        gap_s = between_returns_s(seen, job, _handling(study, setup), pace, rejoin_s)
        # One that costs nothing is taken after each step.
        every_s = max(study.costs.step_s, checkpoint_every_s(study.costs.save_s, gap_s))
    pace = pace._replace(every_s=every_s)
    return run(seen, job, setup, _handling(study, setup), pace, rejoin_s)


def _pace(study: Study, setup: RecoverySetup) -> TrainingPace:
    """What ``setup`` pays for each step beside computing it; it saves no checkpoint yet."""
    job, costs = study.job, study.costs
    tmd, steps = setup.method in (RecoveryMethod.WARM, RecoveryMethod.HOT), study.snapshot_steps
    snapshots = (
        costs.snapshot_s / (steps * costs.step_s)
        if tmd and job.state_exists_once and steps
        else 0.0
    )
    shadow = costs.hot_share * setup.standbys if setup.method is RecoveryMethod.HOT else 0.0
    return TrainingPace(costs.step_s, 0.0, costs.save_s, snapshots, shadow)


def _handling(study: Study, setup: RecoverySetup) -> LossHandling:
    job, costs = study.job, study.costs
    if setup.method is RecoveryMethod.RESTART:
        return Restarting(job, setup.standbys, costs)
    if setup.method is RecoveryMethod.ELASTIC:
        return Shrinking(job, setup.standbys, costs)
    hot = setup.standbys if setup.method is RecoveryMethod.HOT else 0
    every = study.snapshot_steps if job.state_exists_once else 0
    cluster = SimulatedCluster(job, setup.standbys, hot, every, study.rules, costs.prepare_s)
    return StandingBy(cluster, costs)


def losses(trace: Sequence[Fault], job: Job) -> int:
    """How often ``trace`` takes a host or a worker from a rank without a warning."""
    taken = [f for f in trace if f.scope is not FaultScope.JOB and f.place < job.hosts]
    return sum(f.warned is Warned.NOT for f in taken)


def interruptions(trace: Sequence[Fault], job: Job) -> int:
    """Faults of ``trace`` that concern the job's own hosts, or all of it."""
    return sum(f.scope is FaultScope.JOB or f.place < job.hosts for f in trace)

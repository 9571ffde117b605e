"""How many standbys, warm or hot, and how often to save, from simulated outcomes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from msgspec import Struct, structs

from tmd.core.values.snapshots import EVERY
from tmd.simulate.costs import Costs
from tmd.simulate.values import Job, Outcome, RecoveryMethod, RecoverySetup

MOST_STEPS = 100_000
SAME = 1e-6
"""Relative difference of two prices that is none."""


class Price(Struct, frozen=True):
    """What is paid."""

    gpu_hour: float
    gpus: int
    """GPUs of one host."""

    def host_hours(self, hours: float) -> float:
        """The price of so many hours of one host."""
        return self.gpu_hour * self.gpus * hours


class PricedSetup(Struct, frozen=True):
    """One setup, with its price."""

    outcome: Outcome
    """The mean of all runs."""
    least: float
    """The least goodput of a run."""
    greatest: float
    useful_hour: float
    """Price of an hour of undisturbed training of the whole job."""
    gained_h: float
    """Useful hours gained over the setup with one standby fewer. The first hot standby is compared
    with no standby; 0 for a setup without standbys."""
    worth: float
    """Price of ``gained_h`` without a standby."""
    price: float
    """Price of this standby."""

    @property
    def setup(self) -> RecoverySetup:
        return self.outcome.setup


class Advice(Struct, frozen=True):
    """What to do, and the alternatives."""

    best: PricedSetup
    setups: tuple[PricedSetup, ...]
    rivals: tuple[PricedSetup, ...]
    """The best restart and the best elastic job."""
    checkpoint_s: float
    """Training time between checkpoints; 0: none were asked for."""
    snapshot_steps: int
    """Steps between snapshots in memory; 0: none is needed."""
    faults: float
    """Mean number of faults in a run."""


def mean(found: Sequence[Outcome]) -> Outcome:
    """The mean of outcomes of one setup on several traces."""
    first = found[0]
    causes = dict.fromkeys(cause for one in found for cause in one.lost)
    reasons = dict.fromkeys(name for one in found for name in one.counts)
    return structs.replace(
        first,
        useful=fmean(one.useful for one in found),
        lost={c: fmean(one.lost.get(c, 0.0) for one in found) for c in causes},
        faults=fmean(one.faults for one in found),
        counts={n: fmean(one.counts.get(n, 0) for one in found) for n in reasons},
        checkpoint_s=fmean(one.checkpoint_s for one in found),
    )


def checkpoint_every_s(save_s: float, mtbf_s: float) -> float:
    """The time between two checkpoints that loses least, to first order.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    Zero if a checkpoint costs nothing or nothing fails: then no interval is the best one.
    """
    return math.sqrt(2.0 * save_s * mtbf_s) if math.isfinite(mtbf_s) else 0.0


def snapshot_steps(job: Job, costs: Costs, loss_every_s: float) -> int:
    """Steps between two snapshots that lose least; 0 where each state has a replica.

    ``loss_every_s``: mean time between losses of a host of the job.
    """
    if not job.state_exists_once:
        return 0
    every_s = checkpoint_every_s(costs.snapshot_s, loss_every_s)
    if not every_s:
        return EVERY
    return min(MOST_STEPS, max(1, round(every_s / costs.step_s)))


def recommended(
    runs: Mapping[RecoverySetup, Sequence[Outcome]], job: Job, price: Price, steps: int
) -> Advice:
    """What is cheapest for the same work. ``runs``: outcomes of each setup on the same traces."""
    found = list(_priced(runs, job, price))
    ours = [o for o in found if o.setup.method in (RecoveryMethod.WARM, RecoveryMethod.HOT)]
    best = _cheapest(ours)
    rivals = tuple(
        _cheapest(those)
        for method in (RecoveryMethod.RESTART, RecoveryMethod.ELASTIC)
        if (those := [o for o in found if o.setup.method is method])
    )
    return Advice(
        best=best,
        setups=tuple(ours),
        rivals=rivals,
        checkpoint_s=best.outcome.checkpoint_s,
        snapshot_steps=steps,
        faults=best.outcome.faults,
    )


def _priced(
    runs: Mapping[RecoverySetup, Sequence[Outcome]], job: Job, price: Price
) -> Iterator[PricedSetup]:
    means = {setup: mean(found) for setup, found in runs.items()}
    for setup, outcomes in runs.items():
        one = means[setup]
        # The first hot standby is compared with none, too.
        method = (
            RecoveryMethod.WARM
            if setup.method is RecoveryMethod.HOT and setup.standbys == 1
            else setup.method
        )
        fewer = means.get(RecoverySetup(method, setup.standbys - 1))
        gained = one.useful - fewer.useful if fewer is not None else 0.0
        paid = price.host_hours(job.hours) * (job.hosts + setup.standbys)
        yield PricedSetup(
            outcome=one,
            least=min(o.goodput for o in outcomes),
            greatest=max(o.goodput for o in outcomes),
            useful_hour=paid / one.useful if one.useful else float("inf"),
            gained_h=gained,
            worth=price.host_hours(gained) * job.hosts,
            price=price.host_hours(job.hours) if setup.standbys else 0.0,
        )


def _cheapest(found: Sequence[PricedSetup]) -> PricedSetup:
    """The cheapest; of equal ones that with fewer standbys, then the warm one."""
    least = min(option.useful_hour for option in found)
    same = [o for o in found if o.useful_hour <= least * (1.0 + SAME)]
    return min(same, key=lambda o: (o.setup.standbys, o.setup.method is RecoveryMethod.HOT))


# --- why, in sentences ----------------------------------------------------------------------------


def sentences(advice: Advice, job: Job, costs: Costs) -> Iterator[str]:
    """The advice and its reasons, for people."""
    best = advice.best
    yield _what(best)
    yield from _why(advice)
    yield from _kinds(advice)
    for rival in advice.rivals:
        yield _rival(rival, best)
    if advice.checkpoint_s:
        yield (
            f"Take a checkpoint every {_time(advice.checkpoint_s)} of training: then checkpoints "
            "and repeated steps together lose least, to first order."
        )
    if not job.state_exists_once:
        yield "No snapshots in memory are needed, since each state has a replica on another host."
    elif costs.snapshot_s:
        yield (
            f"Take a snapshot in memory every {advice.snapshot_steps} steps: each state exists "
            "once, so that a loss repeats the steps since the latest one."
        )
    else:
        yield (
            f"A snapshot in memory costs nothing that was measured: {advice.snapshot_steps} steps "
            "between two are the default, fewer repeat less."
        )


def _what(best: PricedSetup) -> str:
    number, method = best.setup.standbys, best.setup.method
    if not number:
        return "Keep no standby."
    return f"Keep {number} {method} {'standby' if number == 1 else 'standbys'}."


def _why(advice: Advice) -> Iterator[str]:
    best, hours = advice.best, advice.best.outcome.hours
    yield (
        f"In {hours:g} h the job and its standbys meet {advice.faults:.1f} faults on average. "
        f"The goodput is {best.outcome.goodput:.2%} ({best.least:.2%} to {best.greatest:.2%}), and "
        f"an hour of undisturbed training costs {best.useful_hour:,.2f}."
    )
    method = best.setup.method if best.setup.standbys else RecoveryMethod.WARM
    more = _found(advice, RecoverySetup(method, best.setup.standbys + 1))
    if best.setup.standbys:
        yield (
            f"The last of them gains {best.gained_h:.2f} h of the job, worth {best.worth:,.0f}, "
            f"for {best.price:,.0f}."
        )
    if more is not None:
        yield (
            f"One more would gain {more.gained_h:.2f} h, worth {more.worth:,.0f}, for "
            f"{more.price:,.0f}."
        )
    else:
        yield "That is the most that was tried: more may be better still (--standbys)."


def _kinds(advice: Advice) -> Iterator[str]:
    best = advice.best
    method = RecoveryMethod.WARM if best.setup.method is RecoveryMethod.HOT else RecoveryMethod.HOT
    other = _found(advice, RecoverySetup(method, best.setup.standbys))
    if other is None:
        return
    hours = other.outcome.useful - best.outcome.useful
    yield (
        f"With {method} standbys instead, the job would have {abs(hours):.2f} useful hours "
        f"{'more' if hours > 0 else 'fewer'}."
        if abs(hours) >= 0.005
        else f"With {method} standbys instead, the result would be the same."
    )


def _rival(rival: PricedSetup, best: PricedSetup) -> str:
    what = {
        RecoveryMethod.RESTART: "Restarting from checkpoints",
        RecoveryMethod.ELASTIC: "An elastic job, which trains other batches meanwhile,",
    }[rival.setup.method]
    number = rival.setup.standbys
    spares = f"{number or 'no'} spare {'host' if number == 1 else 'hosts'}"
    more = rival.useful_hour / best.useful_hour - 1.0
    word = "more" if more > 0 else "less"
    return (
        f"{what} is cheapest with {spares}: goodput {rival.outcome.goodput:.2%}, and an hour costs "
        f"{abs(more):.2%} {word}."
    )


def _found(advice: Advice, setup: RecoverySetup) -> PricedSetup | None:
    return next((o for o in advice.setups if o.setup == setup), None)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""Which rank computes more slowly than its peers, and whether all have become slower.

Pure. Each worker judges itself by what the vote tells it of everybody, so all compare the same
steps and nobody else has to remember anything. A step takes equally long on all ranks: it is the
compute time, without waiting for others, that says who is late, and a worker is compared with the
median of the *others* of its peer group, which works for two and cancels what is slow for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from msgspec import Struct, structs

from tmd.core.values.pace import Pace

BLOCK = 10
"""Steps in a block, which is reported as the median of their compute times."""
WINDOW = 2
"""Blocks that are judged together."""
LEARNT = 10
"""Clean blocks after which a worker knows what is usual for it."""
KEPT = 30
"""Clean blocks that say what is usual: the first ones, or what creeps in would become usual."""
RATIO, RATIO_CLEAR = 1.10, 1.05
Z = 5.0
"""So many standard errors above what is usual."""
LEAST_SPREAD = 0.003
LEAST_S = 0.005
"""Less than this is no slowness, however short the steps are: the scheduler hands out slices of
some milliseconds, to some more than to others and not always alike."""
CONFIRM, OF = 3, 4
"""Flagged windows among the latest ones that make it certain."""
CLEAN = 6
"""Clean windows in a row after which it is over."""
MAD = 1.4826
"""From a median absolute deviation to a standard deviation of a normal distribution."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median, in those of a mean."""


class PeerTimings(Struct, frozen=True):
    """Timings of the peer group, from the vote after a block of steps."""

    step: int
    """The last of the block."""
    own_s: float
    others_s: tuple[float, ...]
    """Of the other ranks of the group; at least one."""
    ranks: int
    """Of the whole job."""


class StragglerWatch(Struct, frozen=True):
    """What a worker remembers while the membership stays the same."""

    recent: tuple[float, ...] = ()
    """Log-ratios of the latest blocks, one window of them."""
    usual: tuple[float, ...] = ()
    """Log-ratios of the first clean blocks; none is added while there is suspicion."""
    flags: tuple[bool, ...] = ()
    """Of the latest windows, newest last."""
    suspected: int | None = None
    """Step of the first flagged window of the present suspicion."""
    slow_since: int | None = None
    clean: int = 0
    """Clean windows in a row since it was certain."""
    lost_s: float = 0.0


def judged(watch: StragglerWatch, told: PeerTimings) -> tuple[StragglerWatch, Pace]:
    """What is remembered after one more block, and what is said of it."""
    others = median(told.others_s)
    ratio = math.log(told.own_s / others)
    recent = (*watch.recent, ratio)[-WINDOW:]
    mean = median(recent)
    beyond = _beyond(mean, watch.usual)
    late_s = others * (math.exp(mean) - math.exp(mean - beyond))
    stands_out = late_s >= LEAST_S and _stands_out(mean, beyond, watch.usual)
    flagged = len(recent) == WINDOW and stands_out
    flags = (*watch.flags, flagged)[-OF:]
    suspected = (watch.suspected or told.step) if any(flags) else None
    usual = watch.usual
    if suspected is None and watch.slow_since is None:
        usual = (*usual, ratio)[:KEPT]
    since, clean = _certain(watch, flags, suspected, beyond)
    lost = 0.0
    if since is not None or suspected is not None:
        lost = watch.lost_s + _loss(told, others, usual)
    watch = StragglerWatch(recent, usual, flags, suspected, since, clean, lost)
    return watch, Pace(
        step=told.step,
        busy_s=told.own_s,
        ratio=math.exp(mean),
        slow_since=since,
        lost_s=lost if since is not None else 0.0,
    )


def _stands_out(mean: float, beyond: float, usual: Sequence[float]) -> bool:
    """Slower than the others and than it is as a rule, by more than a trifle and than by chance."""
    if len(usual) < LEARNT or beyond < math.log(RATIO):
        return False
    middle, spread = _spread(usual)
    return mean - middle >= Z * MEDIAN_ERROR * spread / math.sqrt(WINDOW)


def _beyond(mean: float, usual: Sequence[float]) -> float:
    """By how much it is slower than the others, beyond what is usual for it."""
    return mean - max(0.0, median(usual)) if usual else mean


def _certain(
    watch: StragglerWatch, flags: Sequence[bool], suspected: int | None, beyond: float
) -> tuple[int | None, int]:
    """Since when it is slow, and how long it has not been."""
    if watch.slow_since is None:
        return (suspected, 0) if sum(flags) >= CONFIRM else (None, 0)
    clean = watch.clean + 1 if beyond < math.log(RATIO_CLEAR) else 0
    return (None, 0) if clean >= CLEAN else (watch.slow_since, clean)


def _loss(told: PeerTimings, others: float, usual: Sequence[float]) -> float:
    """Seconds that all others waited for this rank in the block, beyond what is usual."""
    always = others * math.exp(median(usual)) if usual else others
    excess = max(0.0, told.own_s - max(others, always))
    return BLOCK * excess * (told.ranks - 1) / told.ranks


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation."""
    middle = median(values)
    return middle, max(MAD * median(abs(v - middle) for v in values), LEAST_SPREAD)


# --- the job as a whole ---------------------------------------------------------------------------

STEPS_LEARNT, LEARNT_S, MOST_LEARNT = 100, 20.0, 2000
"""What is usual is learnt from so many steps, and from so long; but never from more steps."""
BOUND = 3.0
"""A single step counts for no more standard deviations than this, however long it took."""
DRIFT, ALARM = 0.75, 12.0
FULL = 2 * ALARM
"""The sum grows no further, so that it is over soon after it is over."""
CALM = ALARM / 4
"""Below it the job may be as fast again as it was: far from the alarm, so that chance does not go
to and fro between them."""
HOLD_S, CLEAR_S = 10.0, 20.0
"""Seconds of steps for which the sum must be beyond the alarm, or calm, before that is said."""
LEAST_STEPS = 5
"""A step counts for no more than this part of the time that something must hold."""


class Trend(Struct, frozen=True):
    """A one-sided cumulative sum over step times: says that the job got slower, not who did it."""

    first: tuple[float, ...] = ()
    """Logarithms of the first step times, until they say what is usual."""
    learnt_s: float = 0.0
    """How long those steps took."""
    middle: float = 0.0
    spread: float = 0.0
    offset: float = 0.0
    """Mean of the bounded deviations that were usual: long tails are no trend."""
    total: float = 0.0
    beyond_s: float = 0.0
    """Seconds of steps since the sum is beyond the alarm."""
    calm_s: float = 0.0
    """Seconds of steps since it is calm."""
    slower: bool = False


def followed(trend: Trend, step_s: float) -> Trend:
    """The trend after one more step."""
    value = math.log(step_s)
    if trend.spread == 0.0:
        return _learning(trend, value, step_s)
    deviation = _bounded((value - trend.middle) / trend.spread) - trend.offset
    total = min(FULL, max(0.0, trend.total + deviation - DRIFT))
    beyond_s = trend.beyond_s + min(step_s, HOLD_S / LEAST_STEPS) if total > ALARM else 0.0
    calm_s = trend.calm_s + min(step_s, CLEAR_S / LEAST_STEPS) if total < CALM else 0.0
    slower = calm_s < CLEAR_S if trend.slower else beyond_s >= HOLD_S
    return structs.replace(trend, total=total, beyond_s=beyond_s, calm_s=calm_s, slower=slower)


def _learning(trend: Trend, value: float, step_s: float) -> Trend:
    first, learnt_s = (*trend.first, value), trend.learnt_s + step_s
    enough = len(first) >= STEPS_LEARNT and (learnt_s >= LEARNT_S or len(first) >= MOST_LEARNT)
    if not enough:
        return structs.replace(trend, first=first, learnt_s=learnt_s)
    middle, spread = _spread(first)
    # As a part of what a step takes as a rule.
    spread = max(spread, math.log1p(LEAST_S / math.exp(middle)))
    usual = [_bounded((v - middle) / spread) for v in first]
    return Trend(middle=middle, spread=spread, offset=sum(usual) / len(usual))


def _bounded(value: float) -> float:
    return max(-BOUND, min(BOUND, value))

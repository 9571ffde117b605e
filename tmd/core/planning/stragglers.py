"""Detects a rank that computes more slowly than its peers, and a slowdown of all ranks.

Pure. Each worker judges itself by the timings of all ranks in the vote, so that all compare the
same steps and only the worker keeps a history. A step takes equally long on all ranks, so the
compute time, without waits for others, shows which rank is late. A worker is compared with the
median of the *others* of its peer group, which works for two and cancels common slowness.
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
"""Blocks in a window, which are judged together."""
LEARNT = 10
"""Clean blocks after which a worker knows its usual timings."""
KEPT = 30
"""Clean blocks that define the usual: the first ones, so that slow drift does not become usual."""
RATIO, RATIO_CLEAR = 1.10, 1.05
Z = 5.0
"""Threshold in standard errors above the usual."""
LEAST_SPREAD = 0.003
LEAST_S = 0.005
"""Smallest slowness that counts, however short the steps are: the scheduler's time slices of some
milliseconds are distributed unevenly."""
CONFIRM, OF = 3, 4
"""Flagged windows among the latest ones that confirm slowness."""
CLEAN = 6
"""Clean windows in a row after which slowness is over."""
MAD = 1.4826
"""Factor from a median absolute deviation to a standard deviation of a normal distribution."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median, in units of that of a mean."""


class PeerTimings(Struct, frozen=True):
    """Timings of the peer group, from the vote after a block of steps."""

    step: int
    """Last step of the block."""
    own_s: float
    others_s: tuple[float, ...]
    """Timings of the other ranks of the group; at least one."""
    ranks: int
    """Number of ranks of the job."""


class StragglerWatch(Struct, frozen=True):
    """A worker's history while the membership stays the same."""

    recent: tuple[float, ...] = ()
    """Log-ratios of the latest blocks, at most one window."""
    usual: tuple[float, ...] = ()
    """Log-ratios of the first clean blocks; none is added during a suspicion."""
    flags: tuple[bool, ...] = ()
    """Flags of the latest windows, newest last."""
    suspected: int | None = None
    """Step of the first flagged window of the current suspicion."""
    slow_since: int | None = None
    clean: int = 0
    """Clean windows in a row since slowness was confirmed."""
    lost_s: float = 0.0


def judged(watch: StragglerWatch, measured: PeerTimings) -> tuple[StragglerWatch, Pace]:
    """The history after another block, and the report on it."""
    others = median(measured.others_s)
    ratio = math.log(measured.own_s / others)
    recent = (*watch.recent, ratio)[-WINDOW:]
    mean = median(recent)
    beyond = _beyond(mean, watch.usual)
    late_s = others * (math.exp(mean) - math.exp(mean - beyond))
    stands_out = late_s >= LEAST_S and _stands_out(mean, beyond, watch.usual)
    flagged = len(recent) == WINDOW and stands_out
    flags = (*watch.flags, flagged)[-OF:]
    suspected = (watch.suspected or measured.step) if any(flags) else None
    usual = watch.usual
    if suspected is None and watch.slow_since is None:
        usual = (*usual, ratio)[:KEPT]
    since, clean = _certain(watch, flags, suspected, beyond)
    lost = 0.0
    if since is not None or suspected is not None:
        lost = watch.lost_s + _loss(measured, others, usual)
    watch = StragglerWatch(recent, usual, flags, suspected, since, clean, lost)
    return watch, Pace(
        step=measured.step,
        busy_s=measured.own_s,
        ratio=math.exp(mean),
        slow_since=since,
        lost_s=lost if since is not None else 0.0,
    )


def _stands_out(mean: float, beyond: float, usual: Sequence[float]) -> bool:
    """Whether it is slower than its peers and than usual, by more than noise."""
    if len(usual) < LEARNT or beyond < math.log(RATIO):
        return False
    middle, spread = _spread(usual)
    return mean - middle >= Z * MEDIAN_ERROR * spread / math.sqrt(WINDOW)


def _beyond(mean: float, usual: Sequence[float]) -> float:
    """How much slower than its peers it is, beyond the usual."""
    return mean - max(0.0, median(usual)) if usual else mean


def _certain(
    watch: StragglerWatch, flags: Sequence[bool], suspected: int | None, beyond: float
) -> tuple[int | None, int]:
    """The step since which it is slow, and the number of clean windows since."""
    if watch.slow_since is None:
        return (suspected, 0) if sum(flags) >= CONFIRM else (None, 0)
    clean = watch.clean + 1 if beyond < math.log(RATIO_CLEAR) else 0
    return (None, 0) if clean >= CLEAN else (watch.slow_since, clean)


def _loss(measured: PeerTimings, others: float, usual: Sequence[float]) -> float:
    """Seconds that all others waited for this rank in the block, beyond the usual."""
    always = others * math.exp(median(usual)) if usual else others
    excess = max(0.0, measured.own_s - max(others, always))
    return BLOCK * excess * (measured.ranks - 1) / measured.ranks


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation."""
    middle = median(values)
    return middle, max(MAD * median(abs(v - middle) for v in values), LEAST_SPREAD)


# --- the job as a whole ---------------------------------------------------------------------------

STEPS_LEARNT, LEARNT_S, MOST_LEARNT = 100, 20.0, 2000
"""Minimum steps and seconds that define the usual, and the maximum number of steps."""
BOUND = 3.0
"""Maximum standard deviations that a single step counts for."""
DRIFT, ALARM = 0.75, 12.0
FULL = 2 * ALARM
"""Limit of the sum, so that it falls soon after the slowdown ends."""
CALM = ALARM / 4
"""Below it the job may be fast again: far from the alarm, so that noise does not alternate between
them."""
HOLD_S, CLEAR_S = 10.0, 20.0
"""Seconds of steps for which the sum must exceed the alarm, or be calm, before that is reported."""
LEAST_STEPS = 5
"""A step counts for at most one in this many of those seconds."""


class Trend(Struct, frozen=True):
    """A one-sided cumulative sum over step times: shows that the job got slower, not the cause."""

    first: tuple[float, ...] = ()
    """Logarithms of the first step times, until they define the usual."""
    learnt_s: float = 0.0
    """Duration of those steps."""
    middle: float = 0.0
    spread: float = 0.0
    offset: float = 0.0
    """Mean of the usual bounded deviations: long tails are no trend."""
    total: float = 0.0
    beyond_s: float = 0.0
    """Seconds of steps for which the sum has exceeded the alarm."""
    calm_s: float = 0.0
    """Seconds of steps for which it has been calm."""
    slower: bool = False


def followed(trend: Trend, step_s: float) -> Trend:
    """The trend after another step."""
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
    # Relative to the usual step time.
    spread = max(spread, math.log1p(LEAST_S / math.exp(middle)))
    usual = [_bounded((v - middle) / spread) for v in first]
    return Trend(middle=middle, spread=spread, offset=sum(usual) / len(usual))


def _bounded(value: float) -> float:
    return max(-BOUND, min(BOUND, value))

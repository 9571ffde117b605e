"""Formulas: when to save, and what the simulation must agree with where a formula exists."""

from __future__ import annotations

import math


def checkpoint_every_s(save_s: float, mtbf_s: float) -> float:
    """The time between two checkpoints that loses least, to first order.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    Zero if a checkpoint costs nothing or nothing fails: then no interval is the best one.
    """
    return math.sqrt(2.0 * save_s * mtbf_s) if math.isfinite(mtbf_s) else 0.0


def restart_goodput(every_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Goodput of a job that restarts from checkpoints, where faults come at random at any time.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    Future Generation Computer Systems 22(3), 2006: the complete solution.
    """
    wall = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((every_s + save_s) / mtbf_s)
    return every_s / wall


def availability(hosts: int, standbys: int, mtbf_h: float, repair_h: float) -> float:
    """Share of the time in which at least ``hosts`` of all hosts work.

    Each host fails and is repaired independently of the others, so that the number of working ones
    has a binomial distribution, whatever the distribution of repair times.
    """
    works, whole = mtbf_h / (mtbf_h + repair_h), hosts + standbys
    return math.fsum(
        math.comb(whole, n) * works**n * (1.0 - works) ** (whole - n)
        for n in range(hosts, whole + 1)
    )

"""The sentences that say why a standby got a rank and the others did not."""

from __future__ import annotations

from msgspec import structs

from tests.core.test_standbys import BAN, DEGRADED, DONE, FATAL, RECORD, failover, standby, view
from tests.values import member
from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.standby_reasons import MOST_REASONS, reasons, the_first
from tmd.core.values.model import Member, Rehearsal
from tmd.core.values.requests import DrainRequest


def test_a_sentence_about_very_many_workers_names_the_first() -> None:
    """It is in the record of the job, which all its hosts read."""
    workers = [f"h{number}/job/0.a" for number in range(16_384)]

    assert the_first(workers[:5]) == ", ".join(workers[:5])
    assert the_first(workers) == ", ".join(workers[:5]) + " and others"


def test_the_choice_states_the_reason_for_each_standby():
    unfit = (Rehearsal(step=5, seconds=1.0, refusal="other bits"),)
    record = structs.replace(RECORD, history=(failover("h6"),))
    cluster = structs.replace(
        view(
            standby("h2", rehearsed=DONE),
            standby("h3", BAN),
            standby("h4", FATAL),
            standby("h5", rehearsed=unfit),
            standby("h6", rehearsed=DONE),
            standby("h7", rehearsed=DONE),
            standby("h8", DEGRADED),
            standby("h9"),
            drains=(DrainRequest("h9", "r", leave=True),),
        ),
        jobs=(record,),
    )
    chosen = member("h2")
    found = reasons({0: chosen}, cluster, record, PlanFacts(cluster, "job"))

    assert found[0] == ("rank 0: h2/job/0.a: it shadows no rank, its host holds none, rehearsed")
    why = dict(line.removeprefix("not ").split(": ", 1) for line in found[1:])
    assert {worker.split("/")[0]: sentence.split(":")[0] for worker, sentence in why.items()} == {
        "h3": "its host is banned",
        "h4": "nvml.link_down of gpu",
        "h5": "it failed its rehearsal",
        "h6": "a rank was taken off its host more recently",
        "h7": "its name comes later",
        "h8": "its host has a grave finding",
        "h9": "its host is drained ('tmd undrain h9' gives it back)",
    }


def test_no_standby_is_needed_if_no_rank_is_lost():
    """As after a broken link, when the same ranks repeat the step."""
    cluster = view(standby("h2", rehearsed=DONE), standby("h3"))

    assert reasons({}, cluster, RECORD, PlanFacts(cluster, "job")) == (
        "not h2/job/0.a: no more standbys were needed",
        "not h3/job/0.a: no more standbys were needed",
    )


def test_a_plan_keeps_a_bounded_number_of_reasons():
    record = structs.replace(RECORD, history=(failover("h6"),))
    pool = [standby(f"h{n}", rehearsed=DONE) for n in range(2, 1000)]
    cluster = structs.replace(view(*pool), jobs=(record,))
    chosen = Member("h2/job/0.a", "h2", "h2:1")

    assert len(reasons({0: chosen}, cluster, record, PlanFacts(cluster, "job"))) == MOST_REASONS

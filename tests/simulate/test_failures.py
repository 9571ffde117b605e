"""Published tables, and traces drawn from them."""

from __future__ import annotations

import pytest

from tmd.core.values.errors import ConfigError
from tmd.simulate.failures import FaultAssumptions, drawn, mtbf_h, shipped, table_named
from tmd.simulate.values import FaultScope, Job, Warned

LLAMA = shipped()["llama3"]


def test_the_table_of_llama_3_has_the_published_totals() -> None:
    """419 unexpected interruptions and 47 planned ones in 54 days on 16,384 GPUs."""
    unexpected = sum(c.count for c in LLAMA.components if not c.planned)

    assert (unexpected, sum(c.count for c in LLAMA.components) - unexpected) == (419, 47)
    assert mtbf_h(LLAMA, Job(2048), FaultAssumptions()) == pytest.approx(54 * 24 / 466)


def test_a_trace_has_as_many_faults_as_the_table_in_its_time() -> None:
    trace = drawn(LLAMA, Job(2048, hours=54 * 24.0), 0, FaultAssumptions(), seed=1)

    assert len(trace) == pytest.approx(466, abs=3 * 466**0.5)
    assert sum(f.scope is FaultScope.JOB for f in trace) == pytest.approx(56, abs=3 * 56**0.5)
    assert sum(f.warned is Warned.DRAIN for f in trace) == pytest.approx(47, abs=3 * 47**0.5)
    assert [f.at_s for f in trace] == sorted(f.at_s for f in trace)


def test_one_more_standby_changes_no_fault_of_the_others() -> None:
    few, many = (drawn(LLAMA, Job(64, hours=5000.0), n, FaultAssumptions(), seed=1) for n in (1, 4))

    assert set(few) < set(many)
    assert {f.place for f in set(many) - set(few)} <= {65, 66, 67}


def test_an_operator_may_know_better_how_often_the_job_fails() -> None:
    assumptions = FaultAssumptions(mtbf_h=2.0, announced=0.5)
    trace = drawn(LLAMA, Job(16, hours=2000.0), 0, assumptions, seed=1)
    hosts = [f for f in trace if f.scope is FaultScope.HOST and f.warned is not Warned.DRAIN]

    assert len(trace) == pytest.approx(1000, abs=100)
    found = sum(f.warned is Warned.FINDING for f in hosts)
    assert found / len(hosts) == pytest.approx(0.5, abs=0.1)


def test_the_same_seed_draws_the_same_trace() -> None:
    one, same, other = (drawn(LLAMA, Job(64), 2, FaultAssumptions(), seed=s) for s in (1, 1, 2))

    assert one == same != other


def test_an_unknown_table_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no table 'x'; there are llama3, trainmover"):
        table_named("x")

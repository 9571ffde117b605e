"""The verbs, as people and scripts use them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tmd.core.values.errors import ConfigError
from tmd.simulate.main import simulate


def test_simulate_prints_what_it_found_for_programs() -> None:
    """And nothing else; the same seed gives the same output."""
    command = (sys.executable, "-m", "tmd.cli", "simulate", "--hosts", "8", "--days", "100")
    one, same = (
        subprocess.run((*command, "--seed", "7", "--json"), capture_output=True, text=True)
        for _ in range(2)
    )
    found = json.loads(one.stdout)

    assert one.stdout == same.stdout
    assert one.stderr == ""
    assert [o["way"]["kind"] for o in found["outcomes"]].count("warm") == 3
    for outcome in found["outcomes"]:
        whole = outcome["useful"] + sum(outcome["lost"].values())
        assert whole == pytest.approx(outcome["hours"])


def test_simulate_prints_a_table_and_the_source_of_each_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulate(hosts=4, days=30.0, standbys=1, mtbf_h=30.0)
    printed = capsys.readouterr().out

    assert "arXiv 2407.21783" in printed
    assert "hot, 1" in printed
    assert "bench/results/downtime.json, tmd after kill -9" in printed
    assert "assumed" in printed


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ways": "warm,cold"}, "--ways: there is no way 'cold'; there are restart"),
        ({"hosts": 10, "replica_hosts": 4}, "--replica-hosts 4: 10 hosts cannot be divided"),
        ({"mtbf_h": 0.0}, "--mtbf-h 0: give hours above 0"),
        ({"failures": "mine"}, "--failures: there is no table 'mine'"),
        ({"cost": ["step_s"]}, "--cost step_s: write it as step_s=4.5"),
        ({"cost": ["step=3"]}, "--cost: there is no cost 'step'"),
        ({"costs": "mine.toml"}, "cannot read mine.toml"),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(asked: dict, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        simulate(**asked)
    assert said in str(refused.value)

"""The verbs, as people and scripts use them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tmd.core.values.errors import ConfigError
from tmd.simulate.advising import advise
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
    assert [o["setup"]["method"] for o in found["outcomes"]].count("warm") == 3
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


def test_advise_says_why_in_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    advise(hosts=4, days=30.0, standbys=2, mtbf_h=20.0, runs=2)
    printed = " ".join(capsys.readouterr().out.split())

    assert "Keep 2 warm standbys." in printed
    assert "The last of them gains" in printed
    assert "Number of traces: 2; failures: The Llama 3 Herd of Models" in printed


def test_advise_gives_the_same_facts_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    advise(hosts=4, days=30.0, standbys=2, mtbf_h=20.0, runs=2, as_json=True)
    found = json.loads(capsys.readouterr().out)

    assert found["advice"]["best"]["outcome"]["setup"] == {"method": "warm", "standbys": 2}
    assert found["reasons"][0] == "Keep 2 warm standbys."
    assert found["traces"] == 2


def test_a_trace_of_ones_own_is_played_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("at_h,host,repair_h\n10,a,5\n20,b,5\n")
    simulate(hosts=4, days=2.0, standbys=0, methods="warm", trace=file, as_json=True)
    found = json.loads(capsys.readouterr().out)

    assert found["failures"]["source"] == str(file)
    assert found["outcomes"][0]["lost"]["hold"] == pytest.approx(10.0)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("command", [simulate, advise])
def test_lines_of_a_trace_beyond_the_end_of_the_job_are_left_out(
    command: Callable[..., None], as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They do not strike, so that neither failures nor intervals count them."""
    file = tmp_path / "trace.csv"
    within = "at_h,place,scope,warned\n10,0,,\n20,1,,drain\n47.5,,job,\n"
    later = "48,0,,\n48.5,1,,drain\n" + "".join(f"{hour},,job,\n" for hour in range(100, 400))
    printed = []
    for text in (within, within + later):
        file.write_text(text)
        command(hosts=4, replica_hosts=4, days=2.0, trace=file, costs="published", as_json=as_json)
        printed.append(capsys.readouterr())

    assert printed[1].out == printed[0].out
    assert printed[0].err == ""
    assert printed[1].err == (
        f"tmd: warning: {file}: 302 of 305 faults are at or beyond the end of --days 2 and are "
        "left out\n"
    )


def test_a_price_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="--price 0: give a price above 0"):
        advise(price=0.0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"methods": "warm,cold"}, "--methods: no method 'cold'; there are restart"),
        ({"methods": "hot", "standbys": 0}, "--standbys 0: a job with hot standbys has at least 1"),
        ({"chart_file": Path("lost.png")}, "--chart lost.png: only SVG can be drawn"),
        ({"chart_file": Path("/lost/it.svg")}, "--chart /lost/it.svg: there is no folder /lost"),
        ({"hosts": 10, "replica_hosts": 4}, "--replica-hosts 4: 10 hosts cannot be divided"),
        ({"mtbf_h": 0.0}, "--mtbf-h 0: give hours above 0"),
        ({"failures": "mine"}, "--failures: there is no table 'mine'"),
        ({"cost": ["step_s"]}, "--cost step_s: write it as step_s=4.5"),
        ({"cost": ["step=3"]}, "--cost: there is no cost 'step'"),
        ({"costs": "mine.toml"}, "cannot read mine.toml"),
        (
            {"costs": "bnch"},
            "--costs bnch: there is no such file, nor such a set: bench, published",
        ),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(asked: dict, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        simulate(**asked)
    assert said in str(refused.value)


def test_a_folder_in_place_of_the_chart_is_refused_before_the_simulation(tmp_path: Path) -> None:
    (tmp_path / "it.svg").mkdir()
    with pytest.raises(ConfigError, match="this is a folder"):
        simulate(chart_file=tmp_path / "it.svg")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "option", ["--days", "--mtbf-h", "--repair-h", "--notice-h", "--announced", "--checkpoint-s"]
)
@pytest.mark.parametrize("command", [simulate, advise])
def test_a_number_without_an_end_is_refused(
    command: Callable[..., None], option: str, value: float
) -> None:
    """Otherwise the simulation would never end, or compute with what is no number."""
    with pytest.raises(ConfigError, match=f"^{option} -?(inf|nan): give a finite number"):
        command(**{option.removeprefix("--").replace("-", "_"): value})

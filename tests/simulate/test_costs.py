"""Costs have sources, and those of the benchmarks are what the benchmarks say."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tmd.core.values.errors import ConfigError
from tmd.simulate.costs import changed, read, shipped

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_costs_of_the_benchmarks_are_those_in_their_results() -> None:
    """A benchmark that is run again changes costs.toml, too."""
    downtime, hot, peers = (results(n) for n in ("downtime", "hot", "peers"))
    figures, costs = downtime["figures"], shipped()["bench"].costs
    drains = (e["split"]["prepare"] for e in downtime["runs"]["tmd"] if e["kind"] == "planned")
    measured = {
        "step_s": figures["tmd: median step"]["median"],
        "restart_s": figures["torchrun: downtime after kill -9"]["median"],
        "warm_s": figures["tmd: downtime after kill -9"]["median"],
        "hot_s": hot["figures"]["hot 10M"]["set_back_s"]["median"],
        "move_s": figures["tmd: pause of a drain"]["median"],
        "prepare_s": median(drains),
        "resize_s": peers["figures"]["downtime_s"]["median"],
    }

    assert {k: getattr(costs, k) for k in measured} == pytest.approx(measured, abs=0.0006)
    ratio = results("snapshots")["figures"]["ratio by repeat"]
    assert ratio["min"] < 1.0 < ratio["max"], "costs.toml says: within the noise of a step"


@pytest.mark.parametrize("name", list(shipped()))
def test_every_cost_names_its_source(name: str) -> None:
    found = shipped()[name]

    assert set(found.sources) == set(found.costs.__struct_fields__)
    assert all(len(source) > len(f"{name}: ") for source in found.sources.values())


def test_a_file_of_ones_own_changes_some_costs_and_is_their_source(tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    file.write_text("step_s = 4\n")
    found = read(file)

    assert found.costs.step_s == 4.0
    assert found.sources["step_s"] == str(file)
    assert found.sources["warm_s"] == shipped()["bench"].sources["warm_s"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps = 4", "there is no cost 'steps'; there are step_s"),
        ("step_s = -1", "step_s = -1: give a number of at least 0"),
        ("step_s = 0", "step_s = 0: give a number above 0"),
        ("step_s = '4'", "step_s = '4': give a number"),
        ("step_s =", "is not valid TOML"),
    ],
)
def test_a_wrong_file_of_costs_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "costs.toml"
    file.write_text(text)

    with pytest.raises(ConfigError) as refused:
        read(file)
    assert str(file) in str(refused.value)
    assert said in str(refused.value)


def test_a_cost_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="warm_s = nan"):
        changed(shipped()["bench"], {"warm_s": float("nan")}, "--cost")

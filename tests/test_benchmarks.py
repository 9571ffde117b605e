"""What benchmarks measure is there, and a bad run replaces no good result."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

import bench
from bench import speaking
from bench.hosts import Lab
from bench.measure import Report, interval, options, parsed

BENCHMARKS = sorted(
    file.stem
    for file in Path(bench.__path__[0]).glob("*.py")
    if "\ndef main() -> int:" in file.read_text()
)


def test_the_way_from_an_exit_to_the_plan_is_measured(tmp_path: Path, redis_url: str) -> None:
    """A subscriber sees the alert and the record of a real daemon."""
    (fact,) = speaking.plans(Lab(tmp_path, redis_url, dict(os.environ)), 0, detectors="")

    assert 0 < fact["exit_to_plan_s"] < 60
    assert fact["alert_to_plan_s"] == fact["exit_to_plan_s"] - fact["exit_to_alert_s"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "one.json").write_text("good")
    return tmp_path


def reported(
    monkeypatch: pytest.MonkeyPatch, results: Path, *options_: str, fails: bool = False
) -> list[str]:
    """Which files a run with these options has written."""

    def run() -> None:
        if fails:
            raise RuntimeError("no")

    parser = options("one", "")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2])
    monkeypatch.setattr(sys, "argv", ["one", *options_])
    report = Report("one", parsed(parser), results)
    report.attempt("subject", run)
    report.finish({}, {"figure": 1})
    return [file.name for file in sorted(results.iterdir()) if file.read_text() != "good"]


@pytest.mark.parametrize("given", [(), ("--repeats", "6"), ("--sizes", "1", "2")])
def test_a_whole_run_replaces_the_result(
    monkeypatch: pytest.MonkeyPatch, results: Path, given: tuple[str, ...]
) -> None:
    assert reported(monkeypatch, results, *given) == ["one.json"]
    assert json.loads((results / "one.json").read_text())["figures"] == {"figure": 1}


@pytest.mark.parametrize("given", [("--sizes", "1"), ("--repeats", "4")])
def test_a_part_of_a_run_leaves_the_result_alone(
    monkeypatch: pytest.MonkeyPatch, results: Path, given: tuple[str, ...]
) -> None:
    assert reported(monkeypatch, results, *given) == ["one.part.json"]


@pytest.mark.parametrize("named", [True, False])
def test_a_failed_run_leaves_the_result_alone(
    monkeypatch: pytest.MonkeyPatch, results: Path, named: bool
) -> None:
    """Also if the command names the file."""
    given = ("--json", str(results / "one.json")) if named else ()
    assert reported(monkeypatch, results, *given, fails=True) == ["one.failed.json"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It can be imported, and says what its options are."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"bench.{name}").main()

    assert end.value.code == 0
    assert f"python -m bench.{name}" in capsys.readouterr().out


@pytest.mark.parametrize("n", [6, 7, 8, 16, 26, 99, 100])
def test_an_interval_lies_evenly_about_the_median(n: int) -> None:
    """It has the two values that are equally far from either end."""
    between = interval([float(v) for v in range(n)])

    assert between is not None
    assert between[0] == n - 1 - between[1]
    assert between[0] < (n - 1) / 2 < between[1]

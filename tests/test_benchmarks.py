"""What benchmarks measure is there, and a bad run replaces no good result."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from bench import speaking
from bench.hosts import Lab
from bench.measure import Report, interval


def test_the_way_from_an_exit_to_the_plan_is_measured(tmp_path: Path, redis_url: str) -> None:
    """A subscriber sees the alert and the record of a real daemon."""
    (fact,) = speaking.plans(Lab(tmp_path, redis_url, dict(os.environ)), 0, detectors="")

    assert 0 < fact["exit_to_plan_s"] < 60
    assert fact["alert_to_plan_s"] == fact["exit_to_plan_s"] - fact["exit_to_alert_s"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "one.json").write_text("good")
    return tmp_path


def reported(results: Path, *, fails: bool = False, whole: bool = True) -> list[str]:
    """Which files a run has written."""

    def run() -> None:
        if fails:
            raise RuntimeError("no")

    args = argparse.Namespace(json=None, quick=False)
    report = Report("one", args, whole=whole, results=results)
    report.attempt("subject", run)
    report.finish({}, {"figure": 1})
    return [file.name for file in sorted(results.iterdir()) if file.read_text() != "good"]


def test_a_whole_run_replaces_the_result(results: Path) -> None:
    assert reported(results) == ["one.json"]
    assert json.loads((results / "one.json").read_text())["figures"] == {"figure": 1}


@pytest.mark.parametrize(
    ("options", "file"),
    [({"fails": True}, "one.failed.json"), ({"whole": False}, "one.part.json")],
)
def test_a_failed_run_and_a_part_of_one_leave_the_result_alone(
    results: Path, options: dict[str, bool], file: str
) -> None:
    assert reported(results, **options) == [file]


@pytest.mark.parametrize("n", [6, 7, 8, 16, 26, 99, 100])
def test_an_interval_lies_evenly_about_the_median(n: int) -> None:
    """It has the two values that are equally far from either end."""
    between = interval([float(v) for v in range(n)])

    assert between is not None
    assert between[0] == n - 1 - between[1]
    assert between[0] < (n - 1) / 2 < between[1]

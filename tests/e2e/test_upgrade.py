"""A rolling upgrade from the newest release: its daemons are replaced one by one during a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.commands import left_behind, start
from tests.e2e.releases import install, latest_release

STORIES = ("upgrade", "upgrade-workers", "upgrade-standby")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Version and virtual environment of the newest release."""
    version, commit = latest_release()
    return version, install(commit, tmp_path_factory.mktemp("release"))


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("redis_binary")
@pytest.mark.parametrize("story", STORIES)
def test_the_newest_release_and_this_one_run_one_cluster(
    story: str, release: tuple[str, Path], tmp_path: Path, short: Path
) -> None:
    """Moves and losses under leaders of either release; losses and weights do not change by a
    bit, nothing is done twice, and no record is reported as one that cannot be read."""
    version, other = release
    facts = tmp_path / "facts.json"
    run = start(short, "campaign", "run", story, "--other", str(other), "--json", str(facts))
    output, _ = run.communicate(timeout=380)
    told = json.loads(facts.read_text())

    assert run.returncode == 0, output
    assert told["other"] == version
    assert [r["deviations"] for r in told["results"]] == [[]] * len(told["results"])
    assert all(r["seen"]["fired"] for r in told["results"])
    assert "identical to the undisturbed runs" in output
    assert left_behind(short) == []

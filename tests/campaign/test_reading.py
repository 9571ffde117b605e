"""Scenario files: what is shipped is sound, and each mistake is named with its remedy."""

import tomllib
from pathlib import Path

import pytest

from tmd.campaign import reading
from tmd.campaign.faults import KINDS
from tmd.core.values.errors import ConfigError

GOOD = """
[[scenario]]
name = "one"
faults = [{ kind = "process.kill", where = "rank 1", when = "at forward" }]
expect = { plans = ["failover done"], moved = [1], alerts = ["trainer.exited"] }
"""


def wrong(text: str, tmp_path: Path) -> str:
    """What is said of a file with ``text``."""
    file = tmp_path / "story.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        reading.load(file, KINDS)
    return str(caught.value)


def test_what_is_shipped_is_sound_and_uses_every_kind() -> None:
    """At least forty kinds of fault, none without a scenario, no name twice."""
    stories = reading.stories((), KINDS)
    scenarios = [s for story in stories for s in story.scenarios]
    used = {fault.kind for s in scenarios for fault in s.faults}

    assert used == KINDS.keys()
    assert len(KINDS) >= 40
    assert {kind.group for kind in KINDS.values()} >= {
        *("process", "host", "network", "control", "detector", "daemon", "standby", "operator"),
    }
    for story in stories:
        names = [s.name for s in story.scenarios]
        assert len(names) == len(set(names))


def test_a_file_is_read(tmp_path: Path) -> None:
    """Defaults fill what is not written."""
    file = tmp_path / "story.toml"
    file.write_text(GOOD)
    story = reading.load(file, KINDS)

    assert story.name == "story"
    assert story.cluster.ranks == 3
    (scenario,) = story.scenarios
    assert scenario.faults[0].rank == 1
    assert scenario.faults[0].point == "forward"
    assert scenario.expect.moved == (1,)


def test_a_scenario_is_played_at_each_of_its_points(tmp_path: Path) -> None:
    """Under a name of its own, which ``--only`` takes."""
    file = tmp_path / "story.toml"
    new = 'when = "at each point" }, { kind = "process.held", when = "at data" }]\n'
    text = GOOD.replace('when = "at forward" }]\n', new + 'points = ["backward", "in-vote"]\n')
    file.write_text(text)
    first, second = reading.load(file, KINDS).scenarios

    assert (first.name, second.name) == ("one-at-backward", "one-at-in-vote")
    assert [fault.point for fault in first.faults] == ["backward", "data"]
    assert [fault.point for fault in second.faults] == ["in-vote", "data"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("process.kill", "process.kil", "there is no kind 'process.kil'; did you mean"),
        ("plans", "plan", "unknown key [scenario.one.expect] plan; did you mean 'plans'?"),
        ("expect =", "voted = { plan = [] }\nexpect =", "[scenario.one.voted] plan; did you mean"),
        ("where", "were", "unknown key [scenario.one.faults.1] were; did you mean 'where'?"),
        ("rank 1", "rank one", "[scenario.one.faults.1] where: the number of a rank is missing"),
        ("rank 1", "rank 7", "[scenario.one.faults.1] where: the last rank is 2: write one from 0"),
        ("rank 1", "host h9", "where: there is no host 'h9'; there are h1, h2, h3, s1, s2"),
        ("rank 1", "mars", "[scenario.one.faults.1] where: write one of joiner"),
        ("at forward", "at forwards", "[scenario.one.faults.1] when: no such point; there are"),
        ("at forward", "at noon", "when: no such point"),
        ("at forward", "at each point", "[scenario.one] points: write both: points = [...], and"),
        ("faults", "points = ['noon']\nfaults", "points: no such point: noon; there are"),
        ("faults", "points = ['data']\nfaults", "[scenario.one] points: write both"),
        ("rank 1", "leaver", "process.kill happens within a process: write 'rank N'"),
        ('kill", where = "rank 1"', 'kill-now", where = "somebody"', "needs a definite target"),
        ("rank 1", "followed", "where: no standby follows a rank: [cluster] hot = 1"),
        ("at forward", "soon", "when: write 'now', 'at POINT' or 'phase PHASE'"),
        (
            'kill"',
            'kill-now"',
            "[scenario.one.faults.1] when: process.kill-now does not wait for a",
        ),
        ('kill"', 'kill-now"', '{ kind = "process.held", when = "at forward" }'),
        (
            "at forward",
            "phase ready",
            "[scenario.one.faults.1] when: process.kill strikes at a point",
        ),
        ('forward" }', 'forward", for_s = 1.0 }', "faults.1] for_s: process.kill has no duration"),
        ('forward" }', 'forward", until = "done" }', "until: process.kill has no duration: leave"),
        ("failover done", "failover", "[scenario.one.expect] plans: a plan is one of"),
        ("moved = [1]", "moved = [1, 7]", "[scenario.one.expect] moved: the last rank is 2: write"),
        ("moved = [1]", "moved = [-1]", "moved: the last rank is 2: write ranks from 0 to 2, or"),
        ("expect =", "voted = { moved = [3] }\nexpect =", "[scenario.one.voted] moved: the last"),
        ("moved = [1]", "moved = 1", "[scenario.one.expect] moved: expected"),
        ('name = "one"', 'name = "One!"', "use small letters, digits and hyphens"),
        ("[[scenario]]", "[scenario]", "expected a list of tables: [[scenario]]"),
        ("[[scenario]]", "[[scenarios]]", "unknown key scenarios; did you mean 'scenario'?"),
        ("[[scenario]]", "[cluster]\nranks = 1\n[[scenario]]", "[cluster] ranks: expected"),
        ("[[scenario]]", "[cluster]\nnetwork = 'air'\n[[scenario]]", "'namespaces'"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(old: str, new: str, said: str, tmp_path: Path) -> None:
    """File, key, and what could be written instead."""
    assert old in GOOD

    found = wrong(GOOD.replace(old, new), tmp_path)

    assert said in found
    assert "story.toml" in found


def test_no_point_of_the_scenario_is_one_of_a_kind_that_does_not_wait(tmp_path: Path) -> None:
    """It would be played at each point, and strike at none."""
    text = GOOD.replace("process.kill", "process.kill-now").replace("at forward", "at each point")
    text = text.replace("faults", 'points = ["data", "forward"]\nfaults')

    assert "process.kill-now does not wait for a point" in wrong(text, tmp_path)


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    """A line for each."""
    text = GOOD.replace("process.kill", "x.y").replace("moved", "moves")

    assert len(wrong(text, tmp_path).splitlines()) == 2


@pytest.mark.parametrize("text", ["", "name = ", "[job]\nsteps = 100\n"])
def test_a_file_without_a_scenario_is_refused(text: str, tmp_path: Path) -> None:
    """Also one that is no TOML."""
    assert "story.toml" in wrong(text, tmp_path)


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    """Nobody could say which of them to play again."""
    assert "another scenario has this name" in wrong(GOOD + GOOD, tmp_path)


def test_a_file_that_is_not_there_is_named() -> None:
    """With the shipped one that was perhaps meant."""
    with pytest.raises(ConfigError, match="did you mean 'process'"):
        reading.stories(["proces"], KINDS)


def test_every_shipped_file_is_packaged() -> None:
    """What pyproject packages is what is there."""
    root = Path(__file__).parents[2]
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = packaged["package-data"]["tmd.campaign.scenarios"]
    found = {f.name for p in patterns for f in (root / "tmd/campaign/scenarios").glob(p)}

    assert found == {file.name for file in reading.shipped().values()}
    assert packaged["package-data"]["tmd.campaign"] == ["*.c"]

"""``tmd demo`` as a new user runs it, and interrupted."""

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.commands import assert_leaves_nothing, left_behind, start
from tests.marks import thorough

STEPS = 45
"""With thirty, the job may end before the killed rank is replaced if a standby starts slowly."""
DEMO = ("demo", "--steps", str(STEPS))
SMALL = ("--script", str(Path(__file__).with_name("scripts") / "small_demo.py"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("steps", "script"), [(60, SMALL), thorough(STEPS, ())], ids=["small", "own script"]
)
def test_the_demo_shows_two_events_and_identical_losses(
    steps: int, script: tuple[str, ...], tmp_path: Path, short: Path
) -> None:
    """Exit status 0 and a JSON with both events, their split, and the comparison."""
    facts_file = tmp_path / "facts.json"
    demo = start(short, "demo", "--steps", str(steps), *script, "--json", str(facts_file))
    output, _ = demo.communicate(timeout=280)
    assert demo.returncode == 0, output
    facts = json.loads(facts_file.read_text())

    assert facts["losses_identical"] is True
    assert facts["compared_steps"] == facts["steps"] == steps
    planned, failover = facts["events"]
    assert (planned["kind"], failover["kind"]) == ("planned", "failover")
    assert planned["repeated_steps"] == 0
    assert failover["repeated_steps"] <= 1
    # The host that was drained takes over from the one that was killed.
    assert failover["to_host"] == planned["from_host"]
    for event in facts["events"]:
        assert event["split"].keys() == {"detect", "decide", "prepare", "transfer", "resume"}
    assert "losses identical to an undisturbed run: yes" in output
    assert left_behind(short) == []


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, thorough(signal.SIGINT), thorough(signal.SIGKILL)]
)
def test_an_interrupted_demo_leaves_no_process(number: int, short: Path) -> None:
    """A signal while it trains, and even kill -9. Until then it can be watched on the page, at the
    address that it prints."""
    lines: list[str] = []
    jobs: list[str] = []

    def look(line: str) -> None:
        lines.append(line)
        if "training" in line:
            text = "".join(lines)
            (address,) = re.findall(r"page: (http://127.0.0.1:\d+/) +token: \w{32}", text)
            with urllib.request.urlopen(f"{address}v1/state", timeout=10) as answer:
                jobs.extend(record["job"] for record in json.load(answer)["jobs"])

    assert_leaves_nothing(short, *DEMO, "--web", interrupted_at="training", by=number, look=look)

    assert jobs == ["demo"]


def test_a_script_that_fails_in_the_demo_is_shown(tmp_path: Path, short: Path) -> None:
    """Its last lines, without those of the daemon, and no process is left."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('no such data set')\nsys.exit(3)\n")
    demo = start(short, "demo", "--script", str(script))
    output, _ = demo.communicate(timeout=60)

    assert demo.returncode == 1
    shown = output.splitlines()
    assert "no such data set" in shown
    assert "tmd: the demo failed: all launchers have exited" in output
    assert not any(line.startswith("{") for line in shown)
    assert left_behind(short) == []

"""``tmd demo`` as a newcomer runs it, and as an impatient one interrupts it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "tmd.cli", "demo", "--steps", "30")


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """The demo, with all its files below ``folder``."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        (*COMMAND, *more),
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name: the demo's hosts have sockets in it."""
    with tempfile.TemporaryDirectory(prefix="tmd-") as folder:
        yield Path(folder)


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that have to do with ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command + environment and int(process.name) != os.getpid():
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.timeout(300)
def test_the_demo_shows_two_events_and_identical_losses(tmp_path: Path, short: Path) -> None:
    """Exit status 0 and a JSON with both events, their split, and the comparison."""
    facts_file = tmp_path / "facts.json"
    demo = start(short, "--json", str(facts_file))
    output, _ = demo.communicate(timeout=280)
    assert demo.returncode == 0, output
    facts = json.loads(facts_file.read_text())

    assert facts["losses_identical"] is True
    assert facts["compared_steps"] == facts["steps"] == 30
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
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.thorough)]
)
def test_an_interrupted_demo_leaves_no_process(number: int, short: Path) -> None:
    """Ctrl-C while it trains, and even kill -9."""
    demo = start(short)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "training" in line:
            break
    demo.send_signal(number)
    demo.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while left_behind(short) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert left_behind(short) == []
    assert demo.returncode == (130 if number == signal.SIGINT else -number)

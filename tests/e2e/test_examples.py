"""The scripts of ``examples/`` play the story of the demo, as ``make example`` runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import left_behind
from tests.e2e.frameworks import need, torchtitan
from tests.e2e.harness import ROOT

NAMES = sorted(script.parent.name for script in ROOT.glob("examples/*/train.py"))
"""What ``make example NAME=...`` knows."""
EXTRAS = ("accelerate", "lightning", "transformers")
"""Those whose framework ``make example`` installs into the usual environment."""


def interpreter(name: str) -> str:
    """The one that has what the script needs; skips where none has."""
    if name == "torchtitan":
        return torchtitan()
    if name in EXTRAS:
        need(name)
    return sys.executable


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_drained_and_killed_with_identical_losses(
    name: str, tmp_path: Path, short: Path
) -> None:
    """One rank moves, another one is lost, and no process is left."""
    script, facts_file = ROOT / "examples" / name / "train.py", tmp_path / "facts.json"
    demo = (interpreter(name), "-m", "tmd.cli", "demo", "--script", str(script))
    done = subprocess.run(
        (*demo, "--json", str(facts_file)),
        env={**os.environ, "TMPDIR": str(short)},
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(facts_file.read_text())
    assert facts["losses_identical"] is True, facts["difference"]
    assert facts["compared_steps"] == facts["steps"]
    assert [event["kind"] for event in facts["events"]] == ["planned", "failover"]
    assert left_behind(short) == []

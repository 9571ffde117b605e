"""The reported sources of XIDs."""

from __future__ import annotations

import json
import os

import pytest

from tests.test_cli import tmd


@pytest.fixture
def rows_of(shim, tmp_path):
    """The output of a verb about the detector with the library present and these keys."""
    os.mkfifo(tmp_path / "kmsg")

    def run(verb, keys):
        config = tmp_path / "tmd.toml"
        folders = f"runtime_dir = '{tmp_path}'\nstate_dir = '{tmp_path}'\n"
        config.write_text(f"[host]\nname = 'h1'\n{folders}[detectors.xid]\n{keys}")
        done = tmd(verb, "--json", "-c", config, env={"LD_LIBRARY_PATH": str(shim)})
        return {row["name"]: row for row in json.loads(done.stdout)}

    return run


def test_tmd_doctor_shows_the_working_sources(rows_of, tmp_path):
    here, gone = (f"source = '{tmp_path / name}'\n" for name in ("kmsg", "none"))
    points = [
        rows_of("doctor", keys)["detector xid"]
        for keys in (here, f"{here}events = 'always'\n", gone, f"{gone}events = 'never'\n")
    ]
    texts = [point["text"] for point in points]

    assert [point["ok"] for point in points] == [True, True, True, False]
    assert texts[0].endswith("/kmsg; NVML events: not needed where the log can be read")
    assert texts[1].endswith("/kmsg; NVML events: yes")
    assert texts[2].startswith("works here")
    assert texts[2].endswith("No such file or directory; NVML events: yes")
    assert texts[3].endswith("No such file or directory; no NVML events: switched off")


def test_tmd_plugins_shows_the_working_sources(rows_of, tmp_path):
    rows = rows_of("plugins", f"source = '{tmp_path}/none'\n")

    assert rows["xid"]["use"] == "observe"
    assert rows["xid"]["sources"].endswith("NVML events: yes")
    assert rows["nvml"]["sources"] == ""

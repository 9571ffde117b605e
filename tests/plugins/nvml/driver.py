"""A scripted NVML, built once, that the real bindings load."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

XID, NOWHERE = 0x8, 0xFFFFFFFF
"""The kind of an XID event; the MIG instance of an event without one."""
SOURCE = Path(__file__).with_name("shim.c")


class Script:
    """The driver's answers; every call reads it again."""

    def __init__(self, file):
        self._file = file
        self._lines = {}
        self._events = None

    def event(self, gpu, data, *, kind=XID, instance=NOWHERE):
        """Give one event to the process that waits for events, now or later."""
        if self._events is None:
            place = self._file.with_name(f"{self._file.name}.events")
            os.mkfifo(place)
            self._events = os.open(place, os.O_RDWR)
        os.write(self._events, f"{gpu} {kind} {data} {instance}".encode().ljust(64, b"\0"))

    def close(self):
        if self._events is not None:
            os.close(self._events)

    def put(self, facts):
        """Set a line; ``None`` removes it."""
        self._lines |= facts
        lines = [f"{key} {value}\n" for key, value in self._lines.items() if value is not None]
        draft = self._file.with_suffix(".new")
        draft.write_text("".join(lines))
        draft.replace(self._file)


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The folder of the built library."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler in PATH")
        pytest.skip("no C compiler in PATH to build the NVML shim: install gcc")
    folder = tmp_path_factory.mktemp("shim")
    target = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{target.name}"]
    subprocess.run([compiler, *flags, "-o", target, SOURCE], check=True)
    return folder


@pytest.fixture
def script(shim, tmp_path, monkeypatch):
    """The script of a driver with two healthy GPUs, for processes that start later."""
    file = tmp_path / "script"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(shim))
    monkeypatch.setenv("NVML_SHIM", str(file))
    script = Script(file)
    script.put({"count": 2, "field230": 0})
    yield script
    script.close()

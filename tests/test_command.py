"""Why the command of a worker cannot be started, before anything is."""

import os
import sys
from pathlib import Path

import pytest

from tmd.command import command_of, missing

PYTHON = sys.executable


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one of each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    for package in ("runs", "lacks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
        (tmp_path / package / "inner.py").touch()
    (tmp_path / "runs" / "__main__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "script",
    [
        ["train.py", "--lr", "1"],
        ["-m", "runs"],
        ["-m", "lacks.inner"],
        [PYTHON, "-u", "-X", "dev", "train.py"],
        [PYTHON, "-m", "runs.inner"],
        [PYTHON, "-c", "pass"],
        [PYTHON, "runs"],
        ["env", "A=1", "python", "nothing.py"],
        ["-m", "json.tool"],
    ],
    ids=" ".join,
)
def test_what_is_there_is_not_refused(here: Path, script: list[str]) -> None:
    assert missing(command_of(script)) == ""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (["trian.py"], ("there is no file trian.py (in ", "check the path, on this host")),
        (["/nowhere/train.py"], ("there is no file /nowhere/train.py:",)),
        (["folder.py"], ("folder.py (in ", "is a folder: name the Python file in it")),
        ([PYTHON, "-u", "trian.py"], ("there is no file trian.py",)),
        ([PYTHON, "-u"], ("is given nothing to run",)),
        (["-m", "nothing.at.all"], ("there is no module nothing in the Python path",)),
        (["-m", "runs.nothing"], ("there is no module nothing in runs",)),
        (["-m", "runs.inner.deep"], ("runs.inner is a module, not a package",)),
        (["-m", "lacks"], ("lacks is a package without a __main__.py",)),
        (["-m"], ("-m is given nothing: name a module",)),
        (["pyhton", "train.py"], ("there is no program pyhton in PATH",)),
        (["./nothing", "train.py"], ("there is no file nothing",)),
        (["./plain"], ("./plain is not executable: run chmod +x ./plain",)),
        (["./runs"], ("runs (in ", "is a folder")),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_is_not_there_is_named_with_the_remedy(
    here: Path, script: list[str], words: tuple[str, ...]
) -> None:
    why = missing(command_of(script))

    assert all(each in why for each in words), why


def test_a_file_that_cannot_be_read_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of the system is put on: root, as whom tests may run, reads every file."""
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.R_OK)

    why = missing((PYTHON, "train.py"))

    assert "train.py (in " in why
    assert "cannot be read by this user: check its permissions" in why

"""Why the command of a worker cannot be started, before anything is."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
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
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    for package in ("runs", "lacks"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
        (tmp_path / package / "inner.py").touch()
    (tmp_path / "runs" / "__main__.py").touch()
    (tmp_path / "json").mkdir()  # no package: that of the Python path comes before it
    (tmp_path / "extends").mkdir()
    (tmp_path / "extends" / "__init__.py").write_text("__path__.append('/elsewhere')")
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
        ["-m", "extends.elsewhere"],
        [PYTHON, "-um", "runs"],
        [PYTHON, "-mruns", "--lr", "1"],
        [PYTHON, "-Ic", "pass"],
        [PYTHON, "-uWdefault", "train.py"],
        [PYTHON, "-uW", "default", "train.py"],
        [PYTHON, "-u", "--", "train.py"],
        [PYTHON, "--unheard-of", "nothing.py"],
        [PYTHON, "-uZ", "nothing.py"],
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
        ([PYTHON, "-uW", "default", "trian.py"], ("there is no file trian.py",)),
        ([PYTHON, "-u", "--", "trian.py"], ("there is no file trian.py",)),
        ([PYTHON, "-um", "nothing"], ("there is no module nothing in the Python path",)),
        ([PYTHON, "-um"], ("-m is given nothing: name a module",)),
        (["-m", "nothing.at.all"], ("there is no module nothing in the Python path",)),
        (["-m", "runs.nothing"], ("there is no module nothing in runs",)),
        (["-m", "runs.inner.deep"], ("runs.inner is a module, not a package",)),
        (["-m", "lacks"], ("lacks is a package without a __main__.py",)),
        (["-m"], ("-m is given nothing: name a module",)),
        (["pyhton", "train.py"], ("there is no program pyhton in PATH",)),
        (["./nothing", "train.py"], ("there is no file nothing",)),
        (["./plain"], ("./plain is not executable: run chmod +x ./plain",)),
        (["./runs"], ("runs (in ", "is a folder")),
        ([PYTHON, "circle"], ("circle (in ", "cannot be read: Too many levels of symbolic links")),
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


class Editable(MetaPathFinder):
    """Finds one package in a folder that is not in the Python path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if fullname != "afar":
            return None
        package = [str(self._folder)]
        return spec_from_file_location(
            fullname, self._folder / "__init__.py", submodule_search_locations=package
        )


def test_a_module_of_an_editable_installation_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finder stands beside that of the Python path. Nothing is imported."""
    (tmp_path / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable(tmp_path)])

    assert missing(command_of(["-m", "afar.train"])) == ""
    assert "there is no module nothing in afar" in missing(command_of(["-m", "afar.nothing"]))


def test_a_finder_that_fails_does_not_speak_against_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(MetaPathFinder):
        def find_spec(self, *_: object) -> ModuleSpec | None:
            raise RuntimeError("broken")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Broken()])

    assert missing(command_of(["-m", "nothing"])) == ""

"""Detectors' processes that use the standard library alone."""

from __future__ import annotations

import subprocess

import pytest

from tmd.plugin import PluginError, bare_python

CHILD = """
import sys
from importlib.util import find_spec

from .words import GREETING

def main(*names):
    print(GREETING, *[find_spec(name) is not None for name in names])
"""


@pytest.fixture
def child(tmp_path):
    package = tmp_path / "folder with a blank" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "words.py").write_text('GREETING = "here"')
    (package / "child.py").write_text(CHILD)
    return package / "child.py"


def output(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_bare_python_imports_its_own_package_and_nothing_installed(child):
    assert output(bare_python(child, "json", "msgspec", "tmd")) == [
        "here",
        "True",
        "False",
        "False",
    ]


def test_bare_python_imports_the_packages_it_needs(child):
    assert output(bare_python(child, "pynvml", needs=("pynvml",))) == ["here", "True"]
    assert output(bare_python(child, "msgspec", needs=("msgspec",))) == ["here", "True"]


def test_nothing_is_imported_from_the_working_directory(child, tmp_path, monkeypatch):
    (tmp_path / "stray.py").touch()
    monkeypatch.chdir(tmp_path)

    assert output(bare_python(child, "stray")) == ["here", "False"]


def test_a_package_that_is_not_installed_is_named(child):
    with pytest.raises(PluginError, match="no module tmd_nowhere"):
        bare_python(child, needs=("tmd_nowhere",))

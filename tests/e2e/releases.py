"""Installs an earlier release of tmd from the history of this repository, without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.marks import program

ROOT = Path(__file__).parents[2]
RELEASED = re.compile(r"^## (\d+\.\d+\.\d+) ", re.MULTILINE)


def lacking(what: str) -> None:
    """Skip, or fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def latest_release() -> tuple[str, str]:
    """Version and commit of the newest release in the changelog."""
    git = program("git", "git")
    (version, *_) = RELEASED.findall((ROOT / "CHANGELOG.md").read_text())
    search = (git, "-C", str(ROOT), "log", "--format=%H", f"-S## {version} ", "--", "CHANGELOG.md")
    found = subprocess.run(search, capture_output=True, text=True, check=False)
    if found.returncode:
        lacking(f"no history of {version}: run this in a clone of the repository")
    commits = found.stdout.split()
    shallow = subprocess.run(
        (git, "-C", str(ROOT), "rev-parse", "--is-shallow-repository"),
        capture_output=True,
        text=True,
        check=True,
    )
    if not commits or shallow.stdout.strip() == "true":
        lacking(f"the history ends after {version}: git fetch --unshallow")
    return version, commits[-1]


def install(commit: str, folder: Path) -> Path:
    """A virtual environment with the release of ``commit``, and all other packages of this one."""
    source, place = folder / "source", folder / "venv"
    source.mkdir(parents=True)
    tar = subprocess.run(
        ("git", "-C", str(ROOT), "archive", commit), capture_output=True, check=True
    )
    subprocess.run(("tar", "-x", "-C", str(source)), input=tar.stdout, check=True)
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    # Links, not a path: the running tmd is among them, and metadata on any path are found.
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "tmd" not in package.name and package.name != "__pycache__":
            (packages / package.name).symlink_to(package)
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    done = subprocess.run(
        (sys.executable, "-m", "pip", "--python", str(place), "install", *offline, str(source)),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place

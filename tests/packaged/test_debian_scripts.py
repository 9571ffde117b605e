"""What the package's scripts do and say, with their paths below a folder and commands of ours."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "packaging" / "deb"
PLACES = ("/etc/", "/run/", "/var/", "/usr/lib/tmd")
SECRET_HINT, STOPPED_HINT = "put the cluster's secret into", "the service does not run"


class Host:
    """A host with systemd.

    Args:
        active: whether the service runs.
        unit: the daemon of a unit in /etc; ``None`` if there is no unit.
    """

    def __init__(self, root: Path, *, active: bool, unit: str | None = None) -> None:
        self.root = root
        for folder in ("etc/tmd", "run/systemd/system", "var/lib/tmd", "usr/lib/tmd", "bin"):
            (root / folder).mkdir(parents=True)
        self.calls = root / "calls"
        called = f'echo "$*" >>{self.calls}\n'
        self.command(
            "systemctl", f'{called}case "$*" in *is-active*) exit {0 if active else 3};; esac'
        )
        self.command("systemd-sysusers", "exit 0")
        if unit is not None:
            self.file("etc/systemd/system/tmd.service").write_text(f"ExecStart={root}{unit}\n")

    def command(self, name: str, body: str) -> None:
        file = self.root / "bin" / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def file(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    def run(self, script: str, *words: str) -> str:
        text = (SCRIPTS / script).read_text()
        for place in PLACES:
            for before in " =":
                text = text.replace(f"{before}{place}", f"{before}{self.root}{place}")
        path = f"{self.root}/bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["/bin/sh", "-c", text, script, *words],
            env={"PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.parametrize(
    ("active", "secret", "hint"),
    [
        (False, False, SECRET_HINT),
        (False, True, STOPPED_HINT),
        (True, True, ""),
        (True, False, ""),  # systemd may hand it an encrypted one
    ],
)
def test_an_installation_says_what_is_missing(
    tmp_path: Path, active: bool, secret: bool, hint: str
) -> None:
    host = Host(tmp_path, active=active)
    if secret:
        host.file("etc/tmd/secret")
    shown = host.run("postinst", "configure", "0.2.0")

    assert [each for each in (SECRET_HINT, STOPPED_HINT) if each in shown] == [hint] * bool(hint)


OTHER = pytest.mark.parametrize("other", [False, True], ids=["alone", "with another installation"])
UNIT = pytest.mark.parametrize(
    ("unit", "other"),
    [(None, False), ("/opt/tmd/bin/tmd-daemon", True), ("/usr/lib/tmd/bin/tmd-daemon", False)],
    ids=["alone", "with another installation", "edited"],
)
"""What a unit in /etc, which is used instead of that of the package, starts."""


@UNIT
def test_a_removal_does_not_stop_the_daemon_of_another_installation(
    tmp_path: Path, unit: str | None, other: bool
) -> None:
    host = Host(tmp_path, active=True, unit=unit)
    host.run("prerm", "remove")

    assert host.calls.exists() != other


@UNIT
def test_an_installation_names_a_unit_that_is_used_instead(
    tmp_path: Path, unit: str | None, other: bool
) -> None:
    host = Host(tmp_path, active=True, unit=unit)
    shown = host.run("postinst", "configure", "0.2.0")

    assert ("of another installation, is used instead" in shown) == other


@OTHER
def test_a_purge_leaves_another_installation_alone(tmp_path: Path, other: bool) -> None:
    """Of ``tmd systemd install``, made after the package was removed."""
    host = Host(tmp_path, active=False)
    enabled = host.file("etc/systemd/system/multi-user.target.wants/tmd.service")
    state = host.file("var/lib/tmd/journal")
    if other:
        host.file("etc/systemd/system/tmd.service")
    host.run("postrm", "purge")

    assert (enabled.exists(), state.exists()) == (other, other)

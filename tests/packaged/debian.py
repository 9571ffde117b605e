"""A Debian of its own in a folder, in which a package may be installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.marks import program

RELEASE = "bookworm"
PACKAGES = "python3,python3-venv,python3-pip,systemd,systemd-sysv,dbus,redis-server,ca-certificates"
BOOTSTRAP_S = 600
GUEST_S = 180
SERVICE = """\
[Unit]
After=multi-user.target redis-server.service
[Service]
Type=oneshot
ExecStart=/root/play
ExecStopPost=systemctl poweroff --force
TimeoutStartSec=120
[Install]
WantedBy=multi-user.target
"""


def needs_root() -> None:
    """Skip a test that an ordinary user cannot run."""
    if os.geteuid():
        pytest.skip("needs root: run 'sudo make thorough' on a machine where that does no harm")


def bootstrapped(folder: Path) -> Path:
    """The root of a fresh Debian, made from the package index in about a minute."""
    needs_root()
    made = subprocess.run(
        [
            *(program("debootstrap", "debootstrap"), "--variant=minbase"),
            *(f"--include={PACKAGES}", RELEASE, str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=BOOTSTRAP_S,
    )
    if made.returncode:
        pytest.skip(f"no Debian can be installed here: {made.stdout[-500:]}")
    return folder


def booted(root: Path, script: str) -> dict[str, str]:
    """Boot the Debian in ``root`` with systemd, run ``script`` as root, and power it off.

    The script states facts by ``fact NAME VALUE``; they are returned.
    """
    play = root / "root/play"
    head = '#!/bin/sh\nexec >>/root/facts 2>/root/trace\nset -x\nfact() { echo "$1=$2"; }\n'
    play.write_text(head + script)
    play.chmod(0o755)
    unit = root / "etc/systemd/system/play.service"
    unit.write_text(SERVICE)
    wanted = unit.parent / "multi-user.target.wants"
    wanted.mkdir(exist_ok=True)
    (wanted / unit.name).symlink_to(f"/etc/systemd/system/{unit.name}")
    guest = subprocess.run(
        [
            *(program("systemd-nspawn", "systemd-container"), "--directory", str(root), "--boot"),
            *("--private-network", "--register=no", "--keep-unit", "--console=pipe"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=GUEST_S,
    )
    facts = root / "root/facts"
    if not facts.exists():
        pytest.skip(f"systemd does not boot in a container here: {guest.stderr[-500:]}")
    return dict(line.partition("=")[::2] for line in facts.read_text().splitlines() if "=" in line)

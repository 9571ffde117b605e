"""Runs the programs with which a campaign prepares this machine."""

from __future__ import annotations

import subprocess


def run(*command: str) -> str:
    """The output of ``command``.

    Raises:
        OSError: it fails, or is not there.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout

"""Finds another release of tmd, from which a campaign starts processes.

It is a virtual environment, not a checkout: plug-ins are found by the metadata of an installed
distribution, and its dependencies are those that the release was installed with.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from msgspec import Struct

import tmd
from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import in_words
from tmd.demo.cluster import Installation

REMEDY = (
    "python -m venv FOLDER; FOLDER/bin/pip install 'tmd-trainmover[trainer]==VERSION'; "
    "tmd campaign run --other FOLDER"
)
ANSWER_S = 60.0
ASK = "import tmd, tmd.daemon.__main__; print(tmd.__version__); print(tmd.__file__)"


class OtherRelease(Struct, frozen=True):
    """Another release of tmd."""

    folder: Path
    """Its virtual environment."""
    version: str

    @property
    def python(self) -> str:
        return str(python_of(self.folder))

    def installation(self, plugins: Path) -> Installation:
        """Its processes, which find plug-ins in ``plugins`` and nothing of the running release."""
        return Installation(self.python, {"PYTHONPATH": str(plugins)})


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def find(folder: Path) -> OtherRelease:
    """The release that is installed in the virtual environment ``folder``.

    Raises:
        ConfigError: there is none, or it is the running one; the message has the remedy.
    """
    python = python_of(folder.absolute())
    if not os.access(python, os.X_OK):
        raise ConfigError(f"--other {folder}: it is no virtual environment. {REMEDY}")
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        answer = subprocess.run(
            (str(python), "-P", "-c", ASK),
            env=bare,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"--other {folder}: its Python does not run: {in_words(error)}"
        ) from error
    if answer.returncode:
        why = answer.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"--other {folder}: no daemon of tmd is installed there: {why}. {REMEDY}")
    version, place = answer.stdout.splitlines()[-2:]
    if Path(place).resolve() == Path(tmd.__file__).resolve():
        raise ConfigError(f"--other {folder}: it has the running tmd itself. {REMEDY}")
    return OtherRelease(folder.absolute(), version)

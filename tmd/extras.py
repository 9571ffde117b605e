"""Finds missing optional dependencies, and names the command that installs them.

It does not import them, which would take seconds. It also tells the code of installed packages from
that of a user.
"""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path

from tmd.core.values.errors import ConfigError

DISTRIBUTION = "tmd-trainmover"
"""The name under which pip knows tmd: the name ``tmd`` belongs to another project."""
TRAINER = ("torch", "numpy", "wrapt", "xxhash")
"""Packages of the ``trainer`` extra."""
KUBERNETES = ("kopf", "lightkube")
"""Packages of the ``kubernetes`` extra."""
PACKAGES = {"trainer": TRAINER, "kubernetes": KUBERNETES}


def is_installed(file: str) -> bool:
    """Whether ``file`` belongs to an installed package; Debian's Python has a folder of its own."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def is_python(file: str) -> bool:
    """Whether ``file`` belongs to Python itself, or starts the program of a package."""
    folders = (sysconfig.get_path("stdlib"), sysconfig.get_path("scripts"))
    return file.startswith("<frozen ") or any(map(Path(file).is_relative_to, folders))


def install(extra: str) -> str:
    """The command that adds an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def lacking(extra: str) -> str:
    """Why this machine cannot do what ``extra`` is for, with the remedy; empty if it can."""
    missing = [name for name in PACKAGES[extra] if find_spec(name) is None]
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {verb} not installed here: run {install(extra)}"


def need_trainer(verb: str) -> None:
    """Check that training processes can run here.

    Raises:
        ConfigError: a package of the ``trainer`` extra is missing.
    """
    if missing := lacking("trainer"):
        raise ConfigError(f"{verb} trains a model, but {missing}")


def need(extra: str, what: str) -> None:
    """Check that ``what`` can run here.

    Raises:
        ConfigError: a package of ``extra`` is missing.
    """
    if missing := lacking(extra):
        raise ConfigError(f"{what} cannot run: {missing}")

"""Finds missing optional dependencies, and names the command that installs them.

It does not import them, which would take seconds.
"""

from __future__ import annotations

from importlib.util import find_spec

from tmd.core.values.errors import ConfigError

DISTRIBUTION = "tmd-trainmover"
"""The name under which pip knows tmd: the name ``tmd`` belongs to another project."""
TRAINER = ("torch", "numpy", "wrapt", "xxhash")
"""Packages of the ``trainer`` extra."""


def install(extra: str) -> str:
    """The command that adds an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def lacking_trainer() -> str:
    """Why this machine cannot run a training process, with the remedy; empty if it can."""
    lacking = [name for name in TRAINER if find_spec(name) is None]
    if not lacking:
        return ""
    verb = "is" if len(lacking) == 1 else "are"
    return f"{', '.join(lacking)} {verb} not installed here: run {install('trainer')}"


def need_trainer(verb: str) -> None:
    """Check that training processes can run here.

    Raises:
        ConfigError: a package of the ``trainer`` extra is missing.
    """
    if lacking := lacking_trainer():
        raise ConfigError(f"{verb} trains a model, but {lacking}")

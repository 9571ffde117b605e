"""Which optional dependencies are missing, and how to install them.

Found without importing them: that takes seconds.
"""

from __future__ import annotations

from importlib.util import find_spec

from tmd.core.values.errors import ConfigError

TRAINER = ("torch", "numpy", "xxhash")
"""What the ``trainer`` extra installs."""


def lacking_trainer() -> str:
    """Why no training process can run here, with the remedy; empty if one can."""
    lacking = [name for name in TRAINER if find_spec(name) is None]
    if not lacking:
        return ""
    verb = "is" if len(lacking) == 1 else "are"
    return f"{', '.join(lacking)} {verb} not installed here: run pip install 'tmd[trainer]'"


def need_trainer(verb: str) -> None:
    """Return if training processes can run here.

    Raises:
        ConfigError: something of the ``trainer`` extra is missing.
    """
    if lacking := lacking_trainer():
        raise ConfigError(f"{verb} trains a model, but {lacking}")

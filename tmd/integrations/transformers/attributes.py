"""The attributes of a trainer of another class, such as counters, that its steps change."""

from __future__ import annotations

import copy
import logging
from typing import Any

LARGEST = 1000
"""Items of a container that is still compared."""

log = logging.getLogger("tmd.trainer")


def like(here: Any, value: Any) -> Any:
    """A copy of ``value`` whose dictionaries are of the classes that ``here`` has: what moves with
    a rank arrives as plain dictionaries."""
    if not (isinstance(here, dict) and isinstance(value, dict)):
        return copy.deepcopy(value)
    found = copy.copy(here)
    found.clear()
    found.update({key: like(here.get(key), each) for key, each in value.items()})
    return found


def refuse_missing(trainer: Any) -> None:
    """Raises ValueError: ``moved_attributes`` names what the trainer does not have."""
    for name in trainer.moved_attributes:
        if not hasattr(trainer, name):
            raise ValueError(
                f"{type(trainer).__name__}.moved_attributes names {name!r}, which the trainer does "
                "not have: set it in __init__"
            )


class UnnamedAttributes:
    """Warns of attributes that change while a trainer trains and do not move with its rank.

    ``names``: attributes that a class above the trainer of tmd has made.
    """

    def __init__(self, trainer: Any, names: set[str]) -> None:
        values = {name: vars(trainer).get(name) for name in names}
        self._trainer = trainer
        self._values = {n: copy.deepcopy(v) for n, v in values.items() if _is_plain(v)}

    def warn(self) -> None:
        """Name each attribute that has changed, once."""
        now, kind = vars(self._trainer), type(self._trainer).__name__
        for name in [n for n, v in self._values.items() if v is not now.get(n) != v]:
            del self._values[name]
            log.warning(
                "%s.%s has changed while the trainer trains. It does not move with a rank, and "
                "keeps its value if a step is repeated: if numbers or logs depend on it, and it is "
                "equal on all ranks, name it in moved_attributes of the class",
                *(kind, name),
            )


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is cheap to copy and to compare."""
    if isinstance(value, list | tuple | set | dict):
        inner = value.values() if isinstance(value, dict) else value
        return len(value) <= LARGEST and all(map(_is_plain, inner))
    return value is None or isinstance(value, bool | int | float | str)

"""The attributes of classes derived from the trainer, such as counters, that its steps change."""

from __future__ import annotations

import copy
import logging
from array import array
from typing import Any

from torch import Tensor

from tmd.trainer.state.buffers import version

LARGEST = 1000
"""Items of a container that is still compared."""
LONG, FLOATS = 4, "floats"
"""Lists of more floats are copied and moved as bytes: a trainer may add to one in each step."""

log = logging.getLogger("tmd.trainer")


def packed(value: Any) -> Any:
    """``value`` as it moves with a rank: cheap to copy."""
    if isinstance(value, dict):
        return {key: packed(each) for key, each in value.items()}
    if isinstance(value, list) and len(value) > LONG and all(type(v) is float for v in value):
        return FLOATS, array("d", value).tobytes()
    return value


def unpacked(value: Any, here: Any) -> Any:
    """Undo :func:`packed` for an attribute that holds ``here``. Dictionaries arrive as plain ones,
    and tensors in host memory: the result has the classes and the devices of ``here``."""
    match value:
        case (str(kind), bytes(floats)) if kind == FLOATS:
            return array("d", floats).tolist()
        case Tensor():
            return value.clone().to(here.device) if isinstance(here, Tensor) else value.clone()
        case dict() if isinstance(here, dict):
            found = copy.copy(here)
            found.clear()
            found.update({key: unpacked(each, here.get(key)) for key, each in value.items()})
            return found
        case dict():
            return {key: unpacked(each, None) for key, each in value.items()}
        case _:
            return copy.deepcopy(value)


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

    ``names``: attributes that a class derived from the trainer of tmd has made.
    """

    def __init__(self, trainer: Any, names: set[str]) -> None:
        values = {name: vars(trainer).get(name) for name in names}
        self._trainer = trainer
        self._contents = {n: _content(v) for n, v in values.items() if _is_plain(v)}

    def warn(self) -> None:
        """Name each attribute that has changed, once."""
        now, kind = vars(self._trainer), type(self._trainer).__name__
        for name in [n for n, c in self._contents.items() if c != _content(now.get(n))]:
            del self._contents[name]
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
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _content(value: Any) -> Any:
    """What differs once ``value`` has changed. No device is asked for the values of a tensor."""
    match value:
        case Tensor():
            return id(value), version(value)
        case float():
            return repr(value)  # NaN equals itself
        case list() | tuple():
            return [_content(each) for each in value[: LARGEST + 1]]
        case dict():
            return {key: _content(each) for key, each in value.items()}
        case set():
            return frozenset(value)
    return value

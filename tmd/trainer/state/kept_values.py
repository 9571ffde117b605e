"""What the parameter groups of optimizers had before a step."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class KeptValue(NamedTuple):
    """A value of a parameter group, and a copy of it if it is a tensor: the script may hold the
    tensor of a learning rate, too, and fill it."""

    held: Any
    copy: Any

    @classmethod
    def of(cls, value: Any) -> KeptValue:
        return cls(value, value.clone() if isinstance(value, Tensor) else value)


def restore(group: dict[str, Any], values: dict[str, KeptValue]) -> None:
    """Give a parameter group these values again; its parameters stay."""
    for name in group.keys() - {"params", *values}:
        del group[name]
    for name, value in values.items():
        if isinstance(value.held, Tensor):
            value.held.data.copy_(value.copy)
        group[name] = value.held

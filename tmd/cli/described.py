"""Verbs and their parameters, as the manual page and the documentation describe them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def executable_verbs(
    command: Any, path: tuple[str, ...] = ("tmd",)
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each verb below ``command`` that does something, with the words that call it."""
    inner: dict[str, Any] = getattr(command, "commands", {})
    for name in sorted(inner):
        below = (*path, name)
        if getattr(inner[name], "commands", None):
            yield from executable_verbs(inner[name], below)
        else:
            yield below, inner[name]


def arguments_of(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "argument"]


def options_of(command: Any) -> list[Any]:
    """The options that a help text shows."""
    return [p for p in command.params if p.param_type_name == "option" and not p.hidden]


def argument_name(argument: Any) -> str:
    """``HOST``, ``[HOST]`` if it may be left out, ``HOST...`` if it may be repeated."""
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def plain_default(parameter: Any) -> str | int | float | None:
    """A default that can be shown as it is; ``None`` for a switch, a list or no default."""
    default = parameter.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return default if plain else None

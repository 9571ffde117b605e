"""The command-line reference: every verb with its arguments and options, from the verbs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from tmd.cli import verbs


def every(command: Any = None, path: tuple[str, ...] = ("tmd",)) -> Iterator[tuple[str, Any]]:
    """Each verb that does something, with the words that call it."""
    command = verbs() if command is None else command
    inner: dict[str, Any] = getattr(command, "commands", {})
    for name in sorted(inner):
        below = (*path, name)
        if getattr(inner[name], "commands", None):
            yield from every(inner[name], below)
        else:
            yield " ".join(below), inner[name]


def reference() -> str:
    """The page: a section for each verb."""
    return "\n".join(_section(name, command) for name, command in every())


def _section(name: str, command: Any) -> str:
    given = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    names = "".join(f" {_argument(p)}" for p in given)
    lines = [f"\n## {name}\n", f"```console\n$ {name}{names}{' [OPTIONS]' * bool(options)}\n```\n"]
    lines += [f"{part}\n" for part in _paragraphs(command.help)]
    if given or options:
        lines += ["| argument or option | meaning |", "|---|---|"]
        lines += [f"| {_usage(p)} | {_meaning(p)} |" for p in (*given, *options)]
    return "\n".join(lines)


def _argument(parameter: Any) -> str:
    name = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_argument(parameter)}`"
    value = "" if parameter.is_flag else f" {parameter.name.upper()}"
    names = (*sorted(parameter.opts, key=len), *parameter.secondary_opts)
    return ", ".join(f"`{name}{value}`" for name in names)


def _meaning(parameter: Any) -> str:
    words = _cell(" ".join((parameter.help or "").split()))
    default = parameter.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return f"{words} Default: `{default}`." if plain and default != "" else words


def _paragraphs(text: str | None) -> list[str]:
    parts = inspect.cleandoc(text or "").split("\n\n")
    return [_escaped(" ".join(part.split())) for part in parts if part.strip()]


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Markdown of plain text: what looks like a tag or a link is shown as it is."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", text)

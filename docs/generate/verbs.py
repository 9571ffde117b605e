"""The command-line reference: every verb with its arguments and options, from the verbs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from tmd.cli import verbs
from tmd.cli.described import (
    argument_name,
    arguments_of,
    executable_verbs,
    options_of,
    plain_default,
)


def every() -> Iterator[tuple[str, Any]]:
    """Each verb that does something, with the words that call it."""
    return ((" ".join(path), command) for path, command in executable_verbs(verbs()))


def reference() -> str:
    """The page: a section for each verb."""
    return "\n".join(_section(name, command) for name, command in every())


def _section(name: str, command: Any) -> str:
    given, options = arguments_of(command), options_of(command)
    names = "".join(f" {argument_name(p)}" for p in given)
    lines = [f"\n## {name}\n", f"```console\n$ {name}{names}{' [OPTIONS]' * bool(options)}\n```\n"]
    lines += [f"{part}\n" for part in _paragraphs(command.help)]
    if given or options:
        lines += ["| argument or option | meaning |", "|---|---|"]
        lines += [f"| {_usage(p)} | {_meaning(p)} |" for p in (*given, *options)]
    return "\n".join(lines)


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{argument_name(parameter)}`"
    value = "" if parameter.is_flag else f" {parameter.name.upper()}"
    names = (*sorted(parameter.opts, key=len), *parameter.secondary_opts)
    return ", ".join(f"`{name}{value}`" for name in names)


def _meaning(parameter: Any) -> str:
    words = _cell(" ".join((parameter.help or "").split()))
    default = plain_default(parameter)
    return words if default in (None, "") else f"{words} Default: `{default}`."


def _paragraphs(text: str | None) -> list[str]:
    parts = inspect.cleandoc(text or "").split("\n\n")
    return [_escaped(" ".join(part.split())) for part in parts if part.strip()]


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Markdown of plain text: what looks like a tag or a link is shown as it is."""
    return re.sub(r"([<>*_\[\]])", r"\\\1", text)

"""A verb that ends with a script: all that follows the script belongs to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand


class ScriptLast(TyperCommand):
    """Reads no option behind the script, which may be ``-m MODULE``."""

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [each for each in self.get_params(ctx) if each.param_type_name == "option"]
        valued = {name for each in options if not _is_flag(each) for name in each.opts}
        return super().parse_args(ctx, marked(args, valued))


def marked(args: Sequence[str], valued: Collection[str]) -> list[str]:
    """``args`` with ``--`` before a ``-m`` that stands for the script.

    ``valued``: the options that take the next argument.
    """
    rest = iter(enumerate(args))
    for place, arg in rest:
        if arg == "-m":
            return [*args[:place], "--", *args[place:]]
        if arg == "--" or not arg.startswith("-"):
            break
        if arg in valued:
            next(rest, None)
    return list(args)


def _is_flag(option: Any) -> bool:
    return bool(option.is_flag or option.count)

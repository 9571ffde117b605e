"""Reads a section of the configuration: types, limits, and a name for every mistake.

Independent of particular sections. Built on msgspec, which the daemon has loaded anyway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from msgspec import Struct, ValidationError, convert, structs, to_builtins

OWN = "own"
"""A field of this name takes the unknown keys of the section."""
MASK = "**********"
_SPOKEN = {"yes": True, "on": True, "no": False, "off": False}


class Section(Struct, frozen=True, kw_only=True):
    """Base of all sections. ``__post_init__`` may raise :class:`Invalid`."""


S = TypeVar("S", bound=Section)


class Invalid(ValueError):
    """A mistake in a value or, without a key, in a whole section. Never shows the value, which may
    be a secret."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class Problem(NamedTuple):
    """One mistake."""

    where: tuple[str, ...]
    message: str = ""
    """Empty if the key does not exist."""


class Secret:
    """A string that is not shown by accident."""

    def __init__(self, word: str) -> None:
        self._word = word

    def reveal(self) -> str:
        return self._word

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._word == other._word

    def __hash__(self) -> int:
        return hash(self._word)

    def __repr__(self) -> str:
        return f"Secret('{MASK}')"


class Text(str):
    """A value from the environment: the type of its key determines the meaning."""

    __slots__ = ()


def read(kind: type[S], values: object, where: tuple[str, ...]) -> tuple[S | None, list[Problem]]:
    """The section ``kind`` from ``values``, or all mistakes in them."""
    values = plain(values) if isinstance(values, Text) else values
    if not isinstance(values, Mapping):
        return None, [Problem(where, "expected a table of keys")]
    types = {field.name: field.type for field in structs.fields(kind)}
    found: dict[str, Any] = {}
    own: dict[str, Any] = {}
    problems = []
    for key in values:
        if key == OWN or key not in types:
            own[key] = plain(values[key])
            continue
        try:
            found[key] = _value(values[key], types[key])
        except ValidationError as error:
            problems.append(Problem((*where, key), _sentence(error, types[key])))
    if OWN in types:
        found[OWN] = own
    else:
        problems += [Problem((*where, key)) for key in own]
    if problems:
        return None, problems
    try:
        return kind(**found), []
    except Invalid as wrong:
        return None, [Problem(where if wrong.key is None else (*where, wrong.key), str(wrong))]


def shown(section: Section) -> dict[str, Any]:
    """Plain values, to print; secrets are masked."""
    values: dict[str, Any] = to_builtins(section, enc_hook=_printed)
    return values


def _value(given: Any, kind: Any) -> Any:
    if not isinstance(given, Text):
        return _converted(given, kind)
    # Lists and tables are written as JSON; for other types the plain word is tried first.
    try:
        return _converted(str(given), kind)
    except ValidationError as error:
        for reading in (_SPOKEN.get(given.lower()), plain(given)):
            if reading is not None and reading != str(given):
                return _converted(reading, kind)
        raise error


def _converted(given: Any, kind: Any) -> Any:
    return convert(given, kind, strict=False, dec_hook=_custom)


def plain(given: Any) -> Any:
    """A value of unknown type: JSON if it parses, else the word."""
    if isinstance(given, Mapping):
        return {key: plain(value) for key, value in given.items()}
    if not isinstance(given, Text):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return str(given)


def _custom(kind: type, given: Any) -> Any:
    if not isinstance(given, str):
        raise ValidationError(f"Expected `str`, got `{type(given).__name__}`")
    return kind(given)


def _printed(value: Any) -> str:
    return (MASK if value.reveal() else "") if isinstance(value, Secret) else str(value)


def _sentence(error: ValidationError, kind: Any) -> str:
    message = str(error)
    if message.startswith("Invalid enum value"):  # shows the value, which may be a secret
        message = f"expected one of {', '.join(repr(str(choice)) for choice in _choices(kind))}"
    return message[:1].lower() + message[1:]


def _choices(kind: Any) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in _choices(part)]

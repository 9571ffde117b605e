"""The configuration reference: sections, keys, types and defaults, read from the code."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from tmd.config import SECTIONS
from tmd.daemon.plugins import installed
from tmd.extras import DISTRIBUTION
from tmd.plugin import DETECTOR_GROUP, POLICY_GROUP
from tmd.schema import Section
from tmd.sections import DetectorSection

LOCAL = {
    "host.name": "the host name",
    "host.advertise": "the address of the default route",
    "host.runtime_dir": "set by systemd, else `/run/tmd` or a folder of the user",
    "host.state_dir": "set by systemd, else `/var/lib/tmd` or a folder of the user",
    "host.socket": "`runtime_dir`/tmd.sock",
}
"""Defaults that depend on the machine."""


class Key(NamedTuple):
    """One key of one section."""

    section: str
    name: str
    default: str
    meaning: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"


def every_key() -> list[Key]:
    """Every key that a configuration file may have."""
    found = [key for name, kind in SECTIONS.items() for key in _keys(name, kind)]
    found += _keys("detectors.NAME", DetectorSection)
    for group, table in ((DETECTOR_GROUP, "detectors"), (POLICY_GROUP, "policies")):
        for point in installed(group):
            if point.dist is not None and point.dist.name == DISTRIBUTION:
                found += _keys(f"{table}.{point.name}", point.load().Config)
    return found


def reference() -> str:
    """The page: one table for each section."""
    sections: dict[str, list[Key]] = {}
    for key in every_key():
        sections.setdefault(key.section, []).append(key)
    return "\n".join(_section(name, found) for name, found in sections.items())


def _section(name: str, found: list[Key]) -> str:
    rows = [f"| `{k.name}` | {k.default} | {k.meaning} |" for k in found]
    return "\n".join([f"\n## [{name}]\n", "| key | default | meaning |", "|---|---|---|", *rows])


def _keys(section: str, kind: type[Section] | type[msgspec.Struct]) -> Iterator[Key]:
    words = meanings(kind)
    for field in structs.fields(kind):
        if section != "detectors.NAME" and field.name == "own":
            continue  # the tables of the plug-ins themselves
        path = f"{section}.{field.name}"
        yield Key(section, field.name, LOCAL.get(path) or _default(field), words[field.name])


def _default(field: Any) -> str:
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    match value:
        case None:
            return "none"
        case bool():
            return f"`{str(value).lower()}`"
        case "" | ():
            return "empty"
        case tuple():
            return " ".join(f"`{_plain(each)}`" for each in value)
        case dict():
            return "empty"
    return f"`{_plain(value)}`"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def meanings(kind: type) -> dict[str, str]:
    """Key -> the text below its declaration; empty where there is none."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith(("tmd", "test")):
            found |= _declared(each)
    return found


def _declared(kind: type) -> dict[str, str]:
    tree = ast.parse(Path(inspect.getfile(kind)).read_text())
    body = next(
        n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__
    )
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            docstring = after.value if isinstance(after, ast.Expr) else None
            words = docstring.value if isinstance(docstring, ast.Constant) else ""
            found[node.target.id] = " ".join(str(words).split()).replace("|", "\\|")
    return found

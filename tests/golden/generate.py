"""Writes a value of each kind that tmd stores or sends, as the installed version writes it.

    python -m tests.golden.generate tests/golden/VERSION

Run once for each release, at its commit. Every field has a value, and over the lines of a file each
value of an enumeration and each kind of a union, so that a later version which renames or drops one
is noticed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from tmd import wire
from tmd.core.alerts.notices import Announced
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import Alert, HostStatus, JobRecord
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon.codec import Codec

KEY = b"the secret of a cluster of tests"
RECORDS = (
    *(JobRecord, HostStatus, Alert, Breaker, Announced),
    *(DrainRequest, RehearsalRequest, HealthyRequest),
)
MESSAGES = get_args(wire.Message)
VARIANTS = 24
"""No enumeration and no union has more members."""
VERSIONS = {"v", "version"}
"""Fields that count versions have their real value."""


def filled(kind: Any, variant: int) -> Any:
    """A value of ``kind`` whose fields are all set."""
    return msgspec.convert(_builtin(inspect.type_info(kind), "", variant), kind)


def _builtin(info: inspect.Type, name: str, variant: int) -> Any:
    match info:
        case inspect.StructType():
            return _of_struct(info, variant)
        case inspect.UnionType():
            kinds = [t for t in info.types if not isinstance(t, inspect.NoneType)]
            return _builtin(kinds[variant % len(kinds)], name, variant)
        case inspect.EnumType():
            members = list(info.cls)
            return members[variant % len(members)].value
        case inspect.VarTupleType() | inspect.ListType():
            return [_builtin(info.item_type, name, variant)]
        case inspect.DictType():
            return {name: _builtin(info.value_type, name, variant)}
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 1 if name in VERSIONS else 3 + len(name)
        case inspect.FloatType():
            return 0.5 + len(name)
        case inspect.BytesType():
            return "a2V5" * 8  # base64
        case inspect.StrType():
            return name or "text"
    raise TypeError(f"{name}: no value for {info}")


def _of_struct(info: inspect.StructType, variant: int) -> Any:
    values = {f.encode_name: _builtin(f.type, f.name, variant) for f in info.fields}
    if info.array_like:
        return list(values.values())
    return {**values, **({} if info.tag_field is None else {info.tag_field: info.tag})}


def main(folder: Path) -> None:
    """Write one file for each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    codec = Codec(KEY, "")
    for kind in RECORDS:
        _write(folder / f"{kind.__name__}.sealed", kind, lambda v: codec.sealed(v).decode())
    for kind in MESSAGES:
        _write(folder / f"{kind.__name__}.frame", kind, lambda v: wire.encode(v).hex())


def _write(file: Path, kind: Any, encode: Callable[[Any], str]) -> None:
    lines = dict.fromkeys(encode(filled(kind, variant)) for variant in range(VARIANTS))
    file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

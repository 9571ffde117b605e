"""What a detector keeps in its state directory until the host boots again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Kept(Struct, frozen=True):
    """A value that is valid until the host boots again."""

    boot: str = ""
    """The boot in which it was saved: :func:`boot_id`."""


Memory = TypeVar("Memory", bound=Kept)


def boot_id() -> str:
    """Changes with every boot; empty if the host does not provide it."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def recall(file: Path, kind: type[Memory], boot: str) -> Memory:
    """The value saved in this boot; an empty one after a new boot, or if it cannot be read."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return kind(boot)
    return kept if kept.boot == boot else kind(boot)


def keep(file: Path, memory: Kept) -> None:
    """Replace the file atomically.

    Raises:
        OSError: it cannot be written.
    """
    draft = file.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(memory))
    os.replace(draft, file)

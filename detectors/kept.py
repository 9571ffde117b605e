"""What a detector keeps in its state directory until the host boots again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, structs
from tmd_detectors.trouble import Trouble

from tmd.plugin import Signal, boot_id, os_reason


class KeptUntilBoot(Struct, frozen=True):
    """A value that is valid until the host boots again."""

    boot: str = ""
    """The boot in which it was saved: :func:`tmd.plugin.boot_id`."""


Memory = TypeVar("Memory", bound=KeptUntilBoot)


def recall(file: Path, kind: type[Memory], boot: str) -> Memory:
    """The value saved in this boot; an empty one after a new boot, or if it cannot be read."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError):  # also for text that is no JSON, or not UTF-8
        return kind(boot)
    return kept if kept.boot == boot else kind(boot)


def keep(file: Path, memory: KeptUntilBoot) -> None:
    """Replace the file atomically.

    Raises:
        OSError: it cannot be written.
    """
    draft = file.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(memory))
    os.replace(draft, file)


class KeptFile(Generic[Memory]):
    """A file with such a value. It raises the finding ``not_kept`` while it cannot be written."""

    def __init__(self, file: Path, kind: type[Memory], not_kept: str, risk: str) -> None:
        """``risk``: what may happen after a restart, as a sentence without its end."""
        self._file = file
        self._risk = risk
        self._not_kept = Trouble(not_kept)
        self.memory = recall(file, kind, boot_id())

    def keep(self, memory: Memory) -> Iterator[Signal]:
        """Save ``memory`` as a value of this boot, if it differs from what the file has."""
        memory = structs.replace(memory, boot=self.memory.boot)
        problem = ""
        if memory != self.memory:
            try:
                keep(self._file, memory)
                self.memory = memory
            except OSError as error:
                problem = f"{self._risk}: {self._file}: {os_reason(error)}"
        yield from self._not_kept.report(problem)

"""What a detector keeps in its state directory until the host boots again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, structs
from tmd_detectors.trouble import Trouble

from tmd.plugin import ReplacedFile, Signal, boot_id

PATIENCE_S = 0.2
"""Longest time for which a write holds up the daemon. Its other writes may wait, too."""


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


class Saved:
    """The file of such a value. A disk that hangs does not block the detector."""

    def __init__(self, path: Path) -> None:
        self._file = ReplacedFile(path, PATIENCE_S)

    def keep(self, memory: KeptUntilBoot) -> str:
        """Replace the file atomically. Returns why that has failed; empty if it has not."""
        self._file.write(msgspec.json.encode(memory))
        return f"{self._file.path}: {why}" if (why := self._file.problem) else ""


class KeptFile(Generic[Memory]):
    """A file with such a value. It raises the finding ``not_kept`` while it cannot be written."""

    def __init__(self, file: Path, kind: type[Memory], not_kept: str, risk: str) -> None:
        """``risk``: what may happen after a restart, as a sentence without its end."""
        self._file = Saved(file)
        self._risk = risk
        self._not_kept = Trouble(not_kept)
        self.memory = recall(file, kind, boot_id())

    def keep(self, memory: Memory) -> Iterator[Signal]:
        """Save ``memory`` as a value of this boot, if it differs from what the file has."""
        memory = structs.replace(memory, boot=self.memory.boot)
        problem = ""
        if memory != self.memory:
            if why := self._file.keep(memory):
                problem = f"{self._risk}: {why}"
            else:
                self.memory = memory
        yield from self._not_kept.report(problem)

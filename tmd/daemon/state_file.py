"""A small file in the state folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.reasons import in_words
from tmd.replaced_file import ReplacedFile

T = TypeVar("T")

log = structlog.get_logger("tmd.state")


class StateFile(ReplacedFile):
    """``what`` it holds is named in the log."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path)
        self._what = what
        self._kept: object = None
        """What was read or kept last."""

    def read(self, type_: type[T], empty: T) -> T:
        """What is on the disk, in JSON; ``empty`` if there is nothing, or nothing that can be
        read."""
        found = empty
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=type_)
        except FileNotFoundError:
            pass
        except (OSError, *UNREADABLE) as error:
            reason = in_words(error)
            log.warning(f"cannot read {self._what}", file=str(self.path), error=reason)
        self._kept = found
        return found

    def keep(self, value: object) -> None:
        """Write ``value`` if it differs from the last one, or if the disk did not take that."""
        if value != self._kept:
            self._kept = value
            self.write(msgspec.json.encode(value))
        else:
            self.write_again()

    def _failed(self, why: str) -> None:
        log.warning(f"cannot save {self._what}", file=str(self.path), error=why)

    def _worked(self) -> None:
        log.info(f"the disk takes {self._what} again", file=str(self.path))

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

    def read(self, type_: type[T], empty: T) -> T:
        """What is on the disk, in JSON; ``empty`` if there is nothing, or nothing that can be
        read."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=type_)
        except FileNotFoundError:
            return empty
        except (OSError, *UNREADABLE) as error:
            reason = in_words(error)
            log.warning(f"cannot read {self._what}", file=str(self.path), error=reason)
            return empty

    def _failed(self, why: str) -> None:
        log.warning(f"cannot save {self._what}", file=str(self.path), error=why)

    def _worked(self) -> None:
        log.info(f"the disk takes {self._what} again", file=str(self.path))

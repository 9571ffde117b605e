"""A small file in the state folder that is replaced as a whole.

A thread writes it, so that a disk that hangs does not keep the daemon from sending heartbeats.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from tmd.core.values.decode_errors import UNREADABLE
from tmd.core.values.reasons import in_words

PATIENCE_S = 1.0
"""Longest wait for the disk. After that the daemon goes on without it."""

T = TypeVar("T")

log = structlog.get_logger("tmd.state")


class StateFile:
    """``what`` it holds is named in the log."""

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._what = what
        self._changing = threading.Lock()
        self._next: bytes | None = None
        self._thread: threading.Thread | None = None
        self._refused: bytes | None = None
        """The newest data, if they could not be written."""

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

    def write(self, data: bytes) -> None:
        """Replace the file atomically. An error, such as a full disk, is only logged: see
        :meth:`write_again`.

        If the disk hangs, ``data`` is written once it answers, unless there are newer ones then.
        """
        writing = self._begin(data)
        if writing is not None:
            writing.join(PATIENCE_S)
            if writing.is_alive():
                self._log("the disk does not answer")

    def write_again(self) -> None:
        """Try once more to write what the disk did not take, if there is anything. Does not wait
        for it."""
        with self._changing:
            data = None if self._thread is not None else self._refused
        if data is not None:
            self._begin(data)

    def _begin(self, data: bytes) -> threading.Thread | None:
        """The thread that writes ``data`` from now on; ``None`` if there is one already, which
        writes them next, or if none can be had: then they count as refused."""
        with self._changing:
            self._next = data
            if self._thread is not None:
                return None
            writing = threading.Thread(target=self._work, daemon=True)
            try:
                writing.start()
            except RuntimeError as error:
                if self._refused is None:
                    self._log(in_words(error))
                self._refused, self._next = data, None
                return None
            self._thread = writing
            return writing

    def _work(self) -> None:
        while True:
            with self._changing:
                data, self._next = self._next, None
                if data is None:
                    self._thread = None
                    return
            self._replace(data)

    def _replace(self, data: bytes) -> None:
        fresh, before = self.path.with_suffix(".new"), self._refused
        try:
            fresh.write_bytes(data)
            os.replace(fresh, self.path)
        except OSError as error:
            self._refused = data
            if before is None:
                self._log(in_words(error))
            return
        self._refused = None
        if before is not None:
            log.info(f"the disk takes {self._what} again", file=str(self.path))

    def _log(self, error: str) -> None:
        log.warning(f"cannot save {self._what}", file=str(self.path), error=error)

"""Texts for errors; the kind of an error replaces a missing text.

Imports nothing, for use in processes without installed packages.
"""

from __future__ import annotations

import errno
import re

WORDS = {
    "TimeoutError": "timed out",
    "CancelledError": "cancelled",
    "KeyboardInterrupt": "interrupted",
    "MemoryError": "out of memory",
    "EOFError": "the data ends too early",
    "FileNotFoundError": "no such file or folder",
    "FileExistsError": "it exists already",
    "PermissionError": "permission denied",
    "BrokenPipeError": "the other side has closed the connection",
    "ConnectionResetError": "the other side has reset the connection",
    "ConnectionRefusedError": "connection refused",
    "OSError": "the operating system gives no reason",
    "AssertionError": "an assertion does not hold",
}
"""Name of an exception class -> text for instances without one."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def in_words(error: BaseException) -> str:
    """The text of ``error``, or else its kind in words; never empty."""
    text = str(error).strip()
    if text in ("", "''", '""', "None"):  # a KeyError quotes its key, even an empty one
        return kind_in_words(error)
    return f"there is no {text}" if type(error) is KeyError else text


def os_reason(error: OSError) -> str:
    """The system's text, without number and file, for sentences that name the file."""
    return error.strerror or in_words(error)


def place_remedy(error: OSError) -> str:
    """What to do if a file cannot be written, for the end of a sentence."""
    match error.errno:
        case errno.EACCES | errno.EPERM:
            return "run this as a user who may write there, or name another folder"
        case errno.ENOSPC | errno.EDQUOT:
            return "make room there, or name another folder"
        case _:
            return "name another folder"


def kind_in_words(error: BaseException) -> str:
    """``ConnectionAbortedError``: "connection aborted error"."""
    name = type(error).__name__
    return WORDS.get(name) or " ".join(word.lower() for word in _HUMP.split(name))

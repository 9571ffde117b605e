"""Escapes text from outside before it reaches a terminal or a log.

Text of hosts, kernels, scripts and configurations may hold escape sequences, characters that
reverse the direction of writing, or surrogates. Each of them becomes a visible escape.
"""

from __future__ import annotations

import re
import unicodedata

LONGEST = 4000
"""Maximum length of a line; the rest is counted."""
MOST_LINES = 200
"""Maximum number of lines; the first and last half stay, which matter most in a traceback."""
_PERHAPS = re.compile(r"[^\n\x20-\x7e]")
"""Characters in JSON that may need an escape; most text has none."""
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, longest: int = LONGEST) -> str:
    """``text`` as one line of visible characters, cut to ``longest``."""
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text) - longest} more characters)"
    if text.isprintable():
        return text
    return "".join(map(escaped, text))


def printable_lines(text: str, longest: int = LONGEST) -> str:
    """The same for a text of tmd that may have several lines."""
    lines = text.split("\n")
    if more := max(0, len(lines) - MOST_LINES):
        half = MOST_LINES // 2
        lines = [*lines[:half], f"... ({more} lines left out)", *lines[-half:]]
    return "\n".join(printable(line, longest) for line in lines)


def escaped(character: str) -> str:
    """``character``, or its escape if it is a control, a format or an unassigned character."""
    # Python does not call spaces other than ASCII's printable, but they do no harm.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    number = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def valid_text(text: str) -> str:
    """``text`` as valid Unicode: the bytes of a file name that is no UTF-8 become escapes."""
    return text.encode(errors="backslashreplace").decode()


def ascii_json(text: str) -> str:
    """JSON with the value of the JSON ``text`` and without characters that control a terminal."""
    # Outside of strings JSON has no such character except line breaks.
    return _PERHAPS.sub(_json_escape, text)


def only_ascii_json(text: str) -> str:
    """The same without any character that ASCII lacks, for a terminal that is not UTF-8."""
    return _NOT_ASCII.sub(lambda found: _json_unit(found[0]), text)


def _json_escape(found: re.Match[str]) -> str:
    character = found[0]
    if escaped(character) == character:
        return character
    return _json_unit(character)


def _json_unit(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))

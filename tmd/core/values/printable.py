"""The one door for text that is not ours, on its way to a terminal or a log.

What hosts, kernels, scripts and configurations say may hold escape sequences, signs that reverse
the direction of writing, or half a character. Each of them becomes a visible escape.
"""

from __future__ import annotations

import re
import unicodedata

LONGEST = 4000
"""Characters of one line; what is cut off is counted."""
MOST_LINES = 200
"""Of these the first and the last half: a traceback begins and ends with what matters."""
_PERHAPS = re.compile(r"[^\n\x20-\x7e]")
"""What may have to be escaped in JSON; all else need not be looked at."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, longest: int = LONGEST) -> str:
    """``text`` as one line in which every character can be seen, cut to ``longest``."""
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text) - longest} more characters)"
    if text.isprintable():
        return text
    return "".join(map(escaped, text))


def printable_lines(text: str, longest: int = LONGEST) -> str:
    """The same of a text of ours that may have several lines."""
    lines = text.split("\n")
    if more := max(0, len(lines) - MOST_LINES):
        half = MOST_LINES // 2
        lines = [*lines[:half], f"... ({more} lines left out)", *lines[-half:]]
    return "\n".join(printable(line, longest) for line in lines)


def escaped(character: str) -> str:
    """``character`` itself, or its escape if it controls, formats, or stands for nothing."""
    # Other spaces than that of ASCII are not "printable" to Python, but can do no harm.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    number = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def ascii_json(text: str) -> str:
    """JSON that says the same as the JSON ``text`` and holds nothing that a terminal obeys."""
    # Outside of its strings JSON has only line breaks that could be meant.
    return _PERHAPS.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    character = found[0]
    if escaped(character) == character:
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))

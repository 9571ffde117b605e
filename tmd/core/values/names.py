"""Allowed names of hosts, jobs and users: they appear in keys, paths, logs and on terminals."""

from __future__ import annotations

import string

from tmd.core.values.printable import escaped

LONGEST = 200
PLAIN = frozenset(string.ascii_letters + string.digits + "_.-")


def wrong_plain(name: str) -> str:
    """Why ``name`` does not consist of ASCII letters, digits, ``_``, ``.`` and ``-``; or empty."""
    bad = next((c for c in name if c not in PLAIN), "")
    return _sentence(name, bad, "ASCII letters, digits, '_', '.' and '-'")


def wrong_name(name: str) -> str:
    """Why ``name`` cannot name a host, a job or a user; empty if it can."""
    bad = next((c for c in name if c in "/|" or c.isspace() or escaped(c) != c), "")
    return _sentence(name, bad, "printable characters other than '/', '|' and blanks")


def _sentence(name: str, bad: str, allowed: str) -> str:
    if not name:
        return "it is empty; name it"
    if bad:
        place = name.index(bad) + 1
        return f"character {place} is '{escaped(bad)}'; allowed are {allowed}"
    if len(name) > LONGEST:
        return f"it has {len(name)} characters; at most {LONGEST} are allowed"
    return ""

"""Reads the state of the host once, in a process of its own.

It prints the facts first, since later questions may end it. Then comes a line for each path: a file
system that does not answer blocks the reader forever. The clock comes last: a system call filter
may kill the reader for asking.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from .facts import Clock, HostFacts, Process, Question, Space

UNSYNCHRONISED, NANOSECONDS = 0x0040, 0x2000
"""STA_UNSYNC and STA_NANO of <sys/timex.h>."""
TIME_ERROR = 5


def facts(question: Question) -> HostFacts:
    """Facts that can be read without waiting for a device."""
    proc = Path(question.proc_root)
    mounts = parse_mounts(_text(proc / "self/mountinfo"))
    return HostFacts(
        read_only={path: read_only(path, mounts) for path in question.paths},
        pressure_percent=parse_pressure(_text(proc / "pressure/memory")),
        oom_kills=parse_vmstat(_text(proc / "vmstat"), "oom_kill"),
        hung_tasks=_number(_text(proc / "sys/kernel/hung_task_detect_count")),
        sleeping=tuple(_sleeping(proc, question.driver_processes)),
    )


def space(path: str) -> Space | None:
    """Free space for ordinary users; ``None`` if it cannot be read. May hang forever."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Space(
        path=path,
        blocks=100 * found.f_bavail / found.f_blocks if found.f_blocks else 100.0,
        files=100 * found.f_favail / found.f_files if found.f_files else 100.0,
    )


# --- parsers --------------------------------------------------------------------------------------


def parse_mounts(text: str) -> dict[str, frozenset[str]]:
    """Mount point -> options of the file system (proc_pid_mountinfo(5)).

    The options of the mount itself are left out: a hardened service has read-only mounts
    everywhere. A kernel that stops writing changes the options of the file system. The last mount
    on one point hides the others.
    """
    found = {}
    for line in text.splitlines():
        mount, _, system = line.partition(" - ")
        fields, options = mount.split(" "), system.split(" ")
        if len(fields) >= 6 and len(options) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
            found[point] = frozenset(options[2].split(","))
    return found


NOT_WRITABLE = frozenset({"ro", "emergency_ro", "shutdown"})
"""Options of a file system to which nothing can be written."""


def read_only(path: str, mounts: dict[str, frozenset[str]]) -> bool:
    """Whether the file system of ``path`` is read-only. Links are not followed: that may hang."""
    parts = [part for part in path.split("/") if part]
    above = ("/" + "/".join(parts[:n]) for n in range(len(parts), -1, -1))
    nearest = next((place for place in above if place in mounts), "/")
    # When ext4 stops writing after an error, recent kernels keep "rw" and add "emergency_ro".
    return not NOT_WRITABLE.isdisjoint(mounts.get(nearest, ()))


def parse_pressure(text: str) -> float | None:
    """avg60 of the line ``full`` (Documentation/accounting/psi.rst)."""
    found = re.search(r"^full .*?avg60=([0-9]+(?:\.[0-9]+)?)", text, re.MULTILINE | re.ASCII)
    return float(found[1]) if found else None


def parse_vmstat(text: str, key: str) -> int | None:
    found = re.search(rf"^{key} ([0-9]+)$", text, re.MULTILINE | re.ASCII)
    return int(found[1]) if found else None


def parse_stat(text: str) -> Process | None:
    """``/proc/<pid>/stat`` of a process in state D; the name may hold spaces and parentheses."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    if len(fields) < 20 or fields[0] != "D":
        return None
    numbers = [_number(word) for word in (pid, fields[19], fields[11], fields[12])]
    if any(number is None for number in numbers):
        return None
    number, started, user, system = (n or 0 for n in numbers)
    return Process(pid=number, started=started, name=name, ticks=user + system)


# --- reads the system -----------------------------------------------------------------------------


class _Timex(ctypes.Structure):
    """``struct timex``, filled in by the kernel."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock() -> Clock | None:
    """Read the kernel's clock state; ``None`` where that is forbidden."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    unit = 1e-9 if timex.status & NANOSECONDS else 1e-6
    synchronised = state != TIME_ERROR and not timex.status & UNSYNCHRONISED
    return Clock(synchronised=synchronised, offset_s=timex.offset * unit)


def _sleeping(proc: Path, patterns: tuple[str, ...]) -> Iterator[Process]:
    for entry in os.listdir(proc):
        if entry.isdecimal():
            process = parse_stat(_text(proc / entry / "stat"))
            if process is not None and any(fnmatchcase(process.name, p) for p in patterns):
                yield process


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # not on this kernel, or the process has ended
        return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def main(argument: str) -> None:
    question = Question(*json.loads(argument))
    print(json.dumps(facts(question)), flush=True)
    for path in question.paths:
        print(json.dumps(space(path)), flush=True)
    print(json.dumps(read_clock()), flush=True)

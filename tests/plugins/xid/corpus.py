"""Lines of drivers, one of each form, with their parsed values."""

from __future__ import annotations

import fcntl
import os

A, B = "0000:03:00.0", "0000:b3:00.0"
GPU_LOST = "NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus."

LINES = [
    # text, PCI address, XID, pid, MIG instance
    (
        "NVRM: Xid (PCI:0000:03:00): 79, pid='<unknown>', name=<unknown>, "
        "GPU has fallen off the bus.",
        (A, 79, None, ""),
    ),
    ("NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus.", (A, 79, None, "")),
    (
        "NVRM: Xid (0000:03:00): 31, pid=2451, name=python3, Ch 00000008, intr 10000000. MMU "
        "Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f11_a2c00000",
        (A, 31, 2451, ""),
    ),
    (
        "NVRM: Xid (PCI:0000:03:00 GPU-I:05): 94, pid=7194, name=python3, Contained: SM (0x1)",
        (A, 94, 7194, "GPU-I:05"),
    ),
    (
        "NVRM: Xid (PCI:0000:03:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 "
        "(0x004505c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
        (A, 149, None, ""),
    ),
    (
        "NVRM: Xid (PCI:0000:03:00): 145, pid='<unknown>', name=<unknown>, RLW_REMAP Nonfatal "
        "XC1 i0 Link 12 (0x00000004 0x80000000)",
        (A, 145, None, ""),
    ),
    ("NVRM: Xid (PCI:0000:03:00): 45, pid='1234', name=a, b, Ch 0000000e", (A, 45, 1234, "")),
    ("NVRM: Xid (PCI:0000:03:00): 62", (A, 62, None, "")),
    ("NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.", (B, 79, None, "")),
    (
        "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system "
        "has\nNVRM: fallen off the bus and is not responding to commands.",
        (B, 79, None, ""),
    ),
]

LOST_ALONE = [
    # Texts about a lost GPU without a number, with its PCI address.
    ("GPU 18:00.0: GPU has fallen off the bus", "0000:18:00.0"),
    ("NVRM: GPU 18:00.0: GPU has fallen off the bus.", "0000:18:00.0"),
    ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", "0000:18:00.0"),
    ("NVRM: GPU at PCI:0000:18:00: GPU has fallen off the bus.", "0000:18:00.0"),
    ("[ 6781.541783] NVRM: GPU 0009:01:00.0: GPU has fallen off the bus.", "0009:01:00.0"),
    (
        "NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330) installed in this system has "
        "fallen off the bus and is not responding to commands.",
        "0000:18:00.0",
    ),
]

NOISE = [
    "",
    "NVRM: ",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15",
    "NVRM: Xid",
    "NVRM: Xid (",
    "NVRM: Xid (PCI:0000:03:00)",
    "NVRM: Xid (PCI:0000:03:00): ",
    "NVRM: Xid (PCI:0000:03:00): many, pid=1",
    "NVRM: Xid (PCI:0000:zz:00): 79, GPU has fallen off the bus.",
    "NVRM: Xid (): 79",
    "NVRM: GPU has fallen off the bus",
    "GPU has fallen off the bus",
    "GPU nowhere: GPU has fallen off the bus",
    "a log: GPU 18:00.0: GPU has fallen off the bus",
    "GPU 18:00.0: GPU has fallen off the bus, said somebody",
    "NVRM: GPU at PCI:0000:18:00: GPU-b6c3b2be-c55b-d076-fa0e-d464e4c7e08b",
    "[tag] NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus.",
    "NVRM: The NVIDIA GPU",
    "NVRM: fallen off the bus",
    # A line of another program that quotes the driver.
    'audit: comm="NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus."',
    " NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus.",
]


def record(text: str, seq: int, at: float = 100.0, facility: int = 0, tail: str = "") -> bytes:
    """One record of /dev/kmsg, escaped as the kernel does it."""
    escaped = "".join(c if " " <= c <= "~" and c != "\\" else f"\\x{ord(c):02x}" for c in text)
    head = f"{facility << 3 | 3},{seq},{int(at * 1e6)},-"
    return f"{head};{escaped}\n{tail}".encode()


PIPE_BYTES = 1 << 20


def open_pipe(place) -> int:
    """A named pipe that keeps records apart as the log does, open for both ends; never blocks."""
    os.mkfifo(place)
    pipe = os.open(place, os.O_RDWR)
    # Not at opening: some file systems refuse that.
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_DIRECT | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return pipe

"""sd_notify in a few lines: the available libraries do not build everywhere.

The variable is removed from the environment, so that no child can notify for the daemon.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time


class Notifier:
    """Notifies systemd of the daemon's state; does nothing without systemd. Closed by
    :meth:`close`."""

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        usec = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        # Opened once: a daemon that runs out of descriptors must still notify.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        mine = not pid or pid == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdecimal() and mine else None
        """Interval at which systemd expects a notification."""

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """:meth:`ready` ends this state."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={microseconds}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send(self, text: str) -> None:
        if self._socket is not None:
            # systemd may be restarting; it gets the next notification.
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)

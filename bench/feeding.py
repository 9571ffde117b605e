"""Stands in for the kernel log: a flood of lines through a socket that keeps records apart.

Where the reader is too slow the kernel overwrites records. Here records are not sent at all, which
leaves the same gap in the numbers. :class:`FedXid` is a plug-in that the benchmark installs for
itself.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from tmd_detectors.xid.detector import XidDetector

from bench.hosts import DETECTORS, Lab, cpu_s, memory, running, settled
from bench.listening import Subscriber

RATE = 100_000
SECONDS = 10.0
PLACE = "TMD_BENCH_LOG"
TICK_S = 0.001
BUFFER = 1 << 20
"""About as much as a kernel keeps."""
SO_SNDBUFFORCE = 32
AFTER = "NVRM: Xid (PCI:0000:aa:00): 79, GPU has fallen off the bus."


class FedXid(XidDetector):  # type: ignore[misc]
    """The detector ``xid`` with another place to read from."""

    name: ClassVar[str] = "xid_fed"

    def __init__(self) -> None:
        super().__init__(_connect)


def _connect(_: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.connect(os.environ[PLACE])
        one.setblocking(False)
        return one.detach()


class Source:
    """The writing end of the log; a context manager."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._readers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._number = 0
        self.offered = self.left_out = 0

    def __enter__(self) -> Source:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for one in (self._listener, *self._readers):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return  # closed
            with_room = SO_SNDBUFFORCE if os.geteuid() == 0 else socket.SO_SNDBUF
            reader.setsockopt(socket.SOL_SOCKET, with_room, BUFFER)
            self._readers.append(reader)

    def flood(self, seconds: float) -> None:
        """Lines about eight GPUs, each with a different pid, so that no two are equal."""
        reader = self._readers[-1]  # the first one only asked whether there is a log
        reader.setblocking(False)
        started, sent = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < seconds:
            for n in range(self.offered + sent, self.offered + int(passed * RATE)):
                text = f"NVRM: Xid (PCI:0000:{n % 8:02x}:00): 31, pid={n}, name=python3, Ch {n:08x}"
                try:
                    reader.send(self._record(text))
                except BlockingIOError:
                    self.left_out += 1
            sent = int(passed * RATE)
            time.sleep(TICK_S)
        self.offered += sent

    def say(self, text: str) -> None:
        """One more line, once there is room for it."""
        reader = self._readers[-1]
        reader.setblocking(True)
        reader.send(self._record(text))

    def _record(self, text: str) -> bytes:
        self._number += 1
        return f"4,{self._number},{self._number},-;{text}\n".encode()


def install(folder: Path) -> str:
    """Write the plug-in's metadata; returns the PYTHONPATH with which a daemon finds it."""
    facts = folder / "tmd_bench-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: tmd-bench\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[tmd.detectors]\nxid_fed = bench.feeding:FedXid\n")
    places = (str(folder), str(Path.cwd()), os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, places))


def flood(lab: Lab, repeat: int, path: str) -> list[dict[str, Any]]:
    """A flood of :data:`SECONDS`, and then one line of another kind."""
    name = f"flood-{repeat}"
    place = lab.folder / f"log-{repeat}"
    more = DETECTORS + '\n[detectors.xid_fed]\nstrategy = "advise"\n'
    environment = {PLACE: str(place), "PYTHONPATH": path}
    with (
        Source(place) as source,
        running(lab, name, more, **environment) as daemon,
        Subscriber(lab.redis, name) as subscriber,
    ):
        settled(daemon)
        before, cpu = memory(daemon), cpu_s(daemon)
        source.flood(SECONDS / 2)
        half = memory(daemon)
        source.flood(SECONDS / 2)
        cpu = cpu_s(daemon) - cpu
        source.say(AFTER)
        written_at = time.perf_counter()
        received = subscriber.until(
            lambda h: (
                h.alert is not None
                and h.alert["code"] == "xid.79"
                and h.alert["entity"] == "pci:0000:aa:00.0"
            )
        )
        settled(daemon)  # let it publish the rest
        after = memory(daemon)
        published: Any = subscriber.client.xlen(f"{{tmd:{name}}}:alerts")
    return [
        {
            "offered_per_s": source.offered / SECONDS,
            "left_out": source.left_out / source.offered,
            "alerts": published,
            "before_mb": before["daemon_rss_mb"],
            "half_mb": half["daemon_rss_mb"],
            "after_mb": after["daemon_rss_mb"],
            "grown_mb": after["daemon_rss_mb"] - before["daemon_rss_mb"],
            "flood_cpu": cpu / SECONDS,
            "heard_s": received.at - written_at,
        }
    ]

"""A network namespace for each host, joined by a bridge in another namespace. Needs root.

The network of this machine is not changed: the bridge connects only these namespaces.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tmd.campaign.commands import run
from tmd.core.values.reasons import in_words

NETNS = Path("/run/netns")
NOWHERE = "02:00:00:00:00:01"
"""A hardware address that no host has."""


@functools.cache
def unable() -> str:
    """Why this machine cannot create network namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs ip and tc (package iproute2)"
    try:
        with Namespaces([]):
            return ""
    except OSError as error:  # as in most containers
        return f"needs the right to create network namespaces: {in_words(error)}"


class Namespaces:
    """Created on entering the context, removed on leaving it."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._stem = f"tmd-{secrets.token_hex(3)}"
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._make("switch")
            self._in("switch", "ip link add bridge type bridge")
            self._in("switch", "ip link set bridge up")
            for host in self._hosts:
                self._join(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], check=False)
        self._made.clear()

    def file_of(self, host: str) -> str:
        """The file through which a process enters the network of ``host``."""
        return str(NETNS / self._name(host))

    def address(self, host: str) -> str:
        return f"10.99.0.{self._hosts.index(host) + 1}"

    def link(self, host: str, *, up: bool) -> None:
        """Connect or disconnect the cable of ``host``, at the switch."""
        number = self._hosts.index(host)
        self._in("switch", f"ip link set port{number} {'up' if up else 'down'}")

    def mute(self, host: str, peer: str, *, muted: bool) -> None:
        """Drop packets from ``host`` to ``peer``, or no longer. The other direction stays."""
        if muted:
            to = f"{self.address(peer)} lladdr {NOWHERE} dev eth0 nud permanent"
            self._in(host, f"ip neigh replace {to}")
        else:
            self._in(host, f"ip neigh del {self.address(peer)} dev eth0")

    def slow(self, host: str, rate: str) -> None:
        """Limit the outgoing traffic of ``host`` to ``rate``; no limit if empty."""
        if rate:
            shape = f"tbf rate {rate} burst 4kb latency 400ms"
            self._in(host, f"tc qdisc replace dev eth0 root {shape}")
        else:
            self._in(host, "tc qdisc del dev eth0 root")

    def delayed(self, host: str) -> int:
        """How often the limit of :meth:`slow` has delayed a packet."""
        qdiscs = json.loads(self._in(host, "tc -s -j qdisc show dev eth0 root"))
        return int(qdiscs[0]["overlimits"])

    def drop_packets(self, host: str, share: float) -> None:
        """Drop a random ``share`` of the packets that ``host`` sends; none if 0."""
        if share:
            self._in(host, "tc qdisc add dev eth0 clsact")
            self._in(host, "tc filter add dev eth0 egress bpf da bytecode", _dropping(share))
        else:
            self._in(host, "tc qdisc del dev eth0 clsact")

    def dropped(self, host: str) -> int:
        """Number of packets dropped since :meth:`drop_packets`."""
        qdiscs = json.loads(self._in(host, "tc -s -j qdisc show dev eth0 clsact"))
        return int(qdiscs[0]["drops"])

    def _join(self, host: str) -> None:
        number = self._hosts.index(host)
        self._make(host)
        peer = f"peer name port{number} netns {self._name('switch')}"
        self._in(host, f"ip link add eth0 type veth {peer}")
        self._in(host, f"ip addr add {self.address(host)}/24 dev eth0")
        self._in(host, "ip link set lo up")
        self._in(host, "ip link set eth0 up")
        self._in("switch", f"ip link set port{number} master bridge up")

    def _make(self, name: str) -> None:
        run("ip", "netns", "add", self._name(name))
        self._made.append(self._name(name))

    def _in(self, name: str, command: str, *unsplit: str) -> str:
        """The output of ``command``, with the arguments ``unsplit`` added, run in a namespace."""
        return run("ip", "netns", "exec", self._name(name), *command.split(), *unsplit)

    def _name(self, name: str) -> str:
        return f"{self._stem}-{name}"


def _dropping(share: float) -> str:
    """A classic BPF program, since not every kernel has netem: draw a number, and drop the packet
    unless the number is above the share."""
    drawn, passed, shot = 0xFFFFF038, 0xFFFFFFFF, 2  # SKF_AD_RANDOM, TC_ACT_UNSPEC, TC_ACT_SHOT
    limit = int(share * 0xFFFFFFFF)
    # tc's notation: the number of instructions, then "code jump-if-true jump-if-false operand".
    return f"4,32 0 0 {drawn},37 0 1 {limit},6 0 0 {passed},6 0 0 {shot}"

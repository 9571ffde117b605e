"""Fixture trees in the shape of /sys and /proc."""

from __future__ import annotations

import shutil
from pathlib import Path


class Tree:
    """A /sys and a /proc below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        for folder in ("class/net", "class/infiniband", "bus/pci/devices"):
            (self.sys / folder).mkdir(parents=True)
        self.proc.mkdir()

    def write(self, path, value):
        file = self.sys / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")

    def link(self, path, target):
        place = self.sys / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def remove(self, path):
        """A folder and what it has."""
        shutil.rmtree(self.sys / path)

    def pci(self, path, vendor="0x15b3", kind="0x020000"):
        """A device ``0000:00/0000:00:01.0/...`` below a root complex; returns its folder."""
        folder = f"devices/pci{path}"
        self.write(f"{folder}/vendor", vendor)
        self.write(f"{folder}/class", kind)
        self.link(f"bus/pci/devices/{Path(path).name}", self.sys / folder)
        return folder

    def gpu(self, path):
        return self.pci(path, vendor="0x10de", kind="0x030200")

    def interface(self, name, device=None, operstate="up", **files):
        """An Ethernet interface; ``device`` is the folder of its PCI device, if it has one."""
        values = {"type": 1, "operstate": operstate, "carrier_changes": 1, "dev_port": 0}
        for file, value in {**values, **files}.items():
            self.write(f"class/net/{name}/{file}", value)
        if device is not None:
            self.link(f"class/net/{name}/device", self.sys / device)
            (self.sys / device / "net" / name).mkdir(parents=True)

    def rdma(
        self, name, device, guid="b8ce:f603:00a1:0001", layer="InfiniBand", driver="mlx5_core"
    ):
        """An RDMA device with one healthy port."""
        port = f"class/infiniband/{name}/ports/1"
        self.write(f"class/infiniband/{name}/node_guid", guid)
        self.write(f"{port}/state", "4: ACTIVE")
        self.write(f"{port}/phys_state", "5: LinkUp")
        self.write(f"{port}/rate", "400 Gb/sec (4X NDR)")
        self.write(f"{port}/link_layer", layer)
        for counter in ("link_downed", "symbol_error", "port_rcv_errors"):
            self.write(f"{port}/counters/{counter}", 0)
        self.write(f"{port}/hw_counters/rnr_nak_retry_err", 0)
        self.link(f"class/infiniband/{name}/device", self.sys / device)
        self.link(f"{device}/driver", f"../../bus/pci/drivers/{driver}")
        self.write(f"class/infiniband_verbs/uverbs_{name}/ibdev", name)
        return port

    def roce(self, number):
        """An RDMA device with a port over the interface ``eth<number>``, on a card of its own."""
        device = self.pci(f"0000:0{number}/0000:0{number}:01.0")
        guid = f"b8ce:f603:00a1:000{number}"
        port = self.rdma(f"mlx5_{number}", device, guid=guid, layer="Ethernet")
        self.interface(f"eth{number}", device)
        return port

    def move_interface_away(self, number):
        """That of :meth:`roce`, as into the network of a container."""
        self.remove(f"class/net/eth{number}")
        self.remove(f"devices/pci0000:0{number}/0000:0{number}:01.0/net/eth{number}")

    def default_route(self, *interfaces):
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        lines = [f"{i}\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n" for i in interfaces]
        lines.append("eth9\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n")
        (self.proc / "net").mkdir(exist_ok=True)
        (self.proc / "net/route").write_text(head + "".join(lines))

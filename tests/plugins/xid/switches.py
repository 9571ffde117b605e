"""Lines of the NVSwitch driver, each with the resulting finding."""

from __future__ import annotations

FATAL, WARNING, INFO, NONE = "fatal", "warning", "info", None

LINES = [
    # text, PCI address, SXid, link, severity of the finding that the line alone raises
    (
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up",
        ("0000:05:00.0", 20034, 63, FATAL),
    ),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore "
        "MCTO",
        ("0000:c1:00.0", 28006, 46, WARNING),
    ),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted "
        "PRIV error (First)",
        ("0000:05:00.0", 12028, 32, WARNING),
    ),
    (
        "nvidia-nvswitch1: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 44 sourcetrack timeout "
        "error (First)",
        ("0000:c3:00.0", 24007, 44, FATAL),
    ),
    (
        "nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 19084, Non-fatal, Link 29 AN1 Heartbeat "
        "Timeout Error (First)",
        ("0000:c6:00.0", 19084, 29, WARNING),
    ),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 45 Minion Link DLREQ "
        "interrupt",
        ("0000:04:00.0", 22013, 45, INFO),
    ),
    (
        "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short Error Rate",
        ("0000:c3:00.0", 20009, 28, WARNING),
    ),
    (
        "nvidia-nvswitch0: SXid (PCI:0000:ca:00.0): 10003, Fatal, unhandled interrupt in handler",
        ("0000:ca:00.0", 10003, None, FATAL),
    ),
    (
        "nvidia-nvswitch2: SXid (PCI:0000:86:00.0): 11001, Fatal, Link 04 ingress invalid command",
        ("0000:86:00.0", 11001, 4, FATAL),
    ),
    (
        "nvidia-nvswitch2: SXid (PCI:0000:86:00.0): 11012, Non-fatal, Link 04 ingress header ECC "
        "limit (First)",
        ("0000:86:00.0", 11012, 4, INFO),
    ),
    (
        "nvidia-nvswitch5: SXid (PCI:0000:87:00.0): 23001, Fatal, Tile 2 ingress overflow",
        ("0000:87:00.0", 23001, None, FATAL),
    ),
    (
        "nvidia-nvswitch5: SXid (PCI:0000:87:00.0): 22003, Fatal, Minion 1 halted",
        ("0000:87:00.0", 22003, None, FATAL),
    ),
    (
        "nvidia-nvswitch1: SXid (PCI:0000:85:00.0): 10004, NVSWITCH Temperature 97C | TSENSE "
        "WARN Threshold 95C",
        ("0000:85:00.0", 10004, None, WARNING),
    ),
    (
        "nvidia-nvswitch1: SXid (PCI:0000:85:00.0): 10005, NVSWITCH Temperature 90C | TSENSE "
        "WARN Threshold 95C",
        ("0000:85:00.0", 10005, None, NONE),
    ),
    (
        "nvidia-nvswitch1: SXid (PCI:0000:85:00.0): 20001, Non-fatal, Link 11 TX Replay Error",
        ("0000:85:00.0", 20001, 11, INFO),
    ),
    (
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 26006, Fatal, SOE halted",
        ("0000:05:00.0", 26006, None, FATAL),
    ),
    (
        "nvidia-nvswitch0: SXid: (PCI:0000:05:00.0): 14017, Fatal, Link 07 TS ATO timeout",
        ("0000:05:00.0", 14017, 7, FATAL),
    ),
    (
        "[6781753.404587] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 62 LTSSM "
        "Fault Up",
        ("0000:05:00.0", 20034, 62, FATAL),
    ),
    # Not fatal by the line, or by the table, or by both.
    (
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 19047, Non-fatal, Link 51 NCISOC HDR ECC DBE",
        ("0000:05:00.0", 19047, 51, WARNING),
    ),
    (
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20001, Fatal, Link 51 TX Replay Error",
        ("0000:05:00.0", 20001, 51, WARNING),
    ),
    (
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 99999, Fatal, Link 12 something new",
        ("0000:05:00.0", 99999, 12, WARNING),
    ),
    # Lines that follow a report, here without it.
    (
        "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60 "
        "Sub-engine instance 00",
        ("0000:07:00.0", 20034, None, WARNING),
    ),
    (
        "nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 10002, Severity 5 Engine instance 00 "
        "Sub-engine instance 00",
        ("0000:c4:00.0", 10002, None, WARNING),
    ),
    (
        "nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Data {0x000001c0, 0x00bd5c8a, "
        "0x00000500, 0x00000064}",
        ("0000:84:00.0", 12028, None, WARNING),
    ),
]

NOISE = [
    "nvidia-nvswitch0: SXid",
    "nvidia-nvswitch0: SXid (PCI:0000:05:00.0)",
    "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): garbled, Fatal",
    "nvidia-nvswitch0: SXid (PCI:0000:zz:00.0): 20034, Fatal",
    "nvidia-nvswitch0: SXid PCI:0000:05:00.0: 20034, Fatal",
    "nvidia-nvswitch: driver loaded",
    "nvidia-nvswitchX: SXid (PCI:0000:05:00.0): 20034, Fatal",
    "nvidia-nvswitch0: open (major=510)",
    "SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up",
    'audit: comm="nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal"',
    " nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up",
]

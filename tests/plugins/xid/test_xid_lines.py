"""Records and lines of the kernel log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tmd_detectors.xid.lines import XidLineReader, link, says_fatal
from tmd_detectors.xid.records import parse

from .corpus import LINES, LOST_ALONE, NOISE, B, record


def read(*texts):
    reader = XidLineReader()
    return [f for f in (reader.take(t, 1.0) for t in texts) if f is not None]


@pytest.mark.parametrize(("text", "said"), LINES, ids=[t[:60] for t, _ in LINES])
def test_every_form_is_understood(text, said):
    """Through the escapes of the kernel, with continuation lines after them."""
    kept = parse(record(text, seq=7, at=12.5, tail=" SUBSYSTEM=pci\n DEVICE=+pci:0000:03:00.0\n"))
    (fault,) = read(kept.text)

    assert (fault.pci, fault.xid, fault.pid, fault.instance) == said
    assert (kept.seq, kept.at, kept.facility) == (7, 12.5, 0)


@pytest.mark.parametrize("text", NOISE)
def test_other_lines_are_no_gpu_fault(text):
    assert read(text) == []


@pytest.mark.parametrize(("text", "pci"), LOST_ALONE)
def test_every_text_about_a_lost_gpu_becomes_xid_79(text, pci):
    assert [(f.pci, f.xid) for f in read(text)] == [(pci, 79)]


def test_the_gpu_named_just_before_is_taken_for_the_lost_one():
    named = "NVRM: GPU at PCI:0000:18:00: GPU-b6c3b2be-c55b-d076-fa0e-d464e4c7e08b"

    assert [f.pci for f in read(named, "NVRM: GPU has fallen off the bus.")] == ["0000:18:00.0"]


def test_a_lost_gpu_may_be_reported_in_three_records():
    faults = read(
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "usb 1-1: new device",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: fallen off the bus and is not responding to commands.",
    )

    assert [(f.pci, f.xid) for f in faults] == [(B, 79)]


def test_a_gpu_named_long_before_is_not_taken_for_the_lost_one():
    others = ["NVRM: a", "NVRM: b", "NVRM: c"]

    assert read("NVRM: The NVIDIA GPU 0000:b3:00.0", *others, "NVRM: fallen off the bus") == []


def test_every_form_of_a_bus_address_is_normalised():
    texts = [f"NVRM: Xid ({p}): 62" for p in ("PCI:0000:3B:00", "0000:3b:00.0", "00000000:3B:00.0")]

    assert {f.pci for f in read(*texts)} == {"0000:3b:00.0"}


def test_the_fields_of_nvlink5():
    (fault,) = read(LINES[4][0])
    decoded = link(fault)

    assert (decoded.unit, decoded.fatal, decoded.number) == ("NETIR_LINK_EVT", True, 8)
    # Bits 20 to 25 of 0x004505c6.
    assert decoded.subcode == 4
    assert len(decoded.words) == 6


def test_an_older_link_error_has_no_fields_of_nvlink5():
    """Its words look alike: ``NVLink: fatal error``."""
    (fault,) = read(
        "NVRM: Xid (PCI:0000:03:00): 74, pid='<unknown>', name=<unknown>, "
        "NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0)"
    )

    assert fault.xid == 74
    assert link(fault) is None
    assert says_fatal(fault)


def test_nvlink5_fields_after_a_process_are_parsed():
    (fault,) = read(LINES[5][0])
    decoded = link(fault)

    assert (decoded.unit, decoded.fatal, decoded.number) == ("RLW_REMAP", False, 12)


@pytest.mark.parametrize(
    "raw",
    [b"", b";", b"3,1,1", b"3,1;x", b"3,1,1;x", b"-3,1,1,-;x", b"3,x,1,-;x", b"3," + b"9" * 99],
)
def test_invalid_records_are_ignored(raw):
    assert parse(raw) is None


def test_an_additional_header_field_is_ignored():
    """Kernels with CONFIG_PRINTK_CALLER name the caller."""
    kept = parse(b"6,339,5140900,-,caller=T1;NVRM: Xid (PCI:0000:03:00): 62\n")

    assert (kept.seq, kept.text) == (339, "NVRM: Xid (PCI:0000:03:00): 62")


@given(st.binary(max_size=300))
def test_no_bytes_make_the_parser_fail(raw):
    kept = parse(raw)
    faults = [] if kept is None else read(kept.text)

    assert len(faults) <= 1


PIECES = st.sampled_from(
    [
        *("NVRM: ", "Xid (", "PCI:", "0000:03:00", "): ", "79", "149", ", ", "pid=", "'", "(", ")"),
        *("name=", "0x4505c6", " Fatal ", "Link 08", "GPU ", "The NVIDIA GPU ", " ", "\n", "²"),
        *("fallen off the bus", "GPU-I:05", "NETIR_LINK_EVT"),
    ]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=30).map("".join))
def test_no_mixture_of_known_tokens_makes_the_parser_fail(text):
    for fault in read("NVRM: " + text, text):
        link(fault)

        assert len(fault.line) + len(fault.detail) <= 1000


def test_a_long_line_is_kept_short():
    (fault,) = read("NVRM: Xid (PCI:0000:03:00): 13, " + "pid=" * 100_000)

    assert len(fault.line) + len(fault.detail) <= 1000

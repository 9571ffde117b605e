"""Reading the host: parsers on the kernel's formats, and this machine."""

from __future__ import annotations

import os
import resource
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tmd_detectors.host import reader
from tmd_detectors.host.detector import Avoided, HostDetector, HostDetectorConfig
from tmd_detectors.host.facts import Clock, HostFacts, Process, Question, Space
from tmd_detectors.host.probe import ask, parse

from tmd.plugin import Severity
from tmd.testing import FakeContext

MOUNTINFO = r"""22 1 8:1 / / ro,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
23 22 0:21 / /dev/shm rw,nosuid - tmpfs tmpfs rw
24 22 8:2 / /data\040set rw,relatime - xfs /dev/sdb1 ro
25 22 8:3 / /data rw - ext4 /dev/sdc1 rw
26 25 8:3 / /data rw - ext4 /dev/sdd1 ro
27 22 8:4 / /broken rw - ext4 /dev/sde1 rw,emergency_ro
"""
STAT = "{pid} ({name}) {state} 2 0 0 0 -1 69238880 0 0 0 0 {user} {system} 0 0 20 0 1 0 {started} 0"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", False),  # the mount is read-only, the file system is not
        ("/tmp/x", False),
        ("/data set/y", True),
        ("/data", True),
        ("/data/deep/below", True),
        ("/database", False),
        ("/dev/shm", False),
        ("/broken/x", True),  # ext4 of recent kernels
        ("relative", False),
    ],
)
def test_the_file_system_of_a_path_decides_whether_it_is_read_only(path, expected):
    assert reader.read_only(path, reader.parse_mounts(MOUNTINFO)) is expected


def test_pressure_is_the_minute_of_the_line_full():
    text = (
        "some avg10=9.00 avg60=8.00 avg300=7.00 total=1\n"
        "full avg10=3.00 avg60=2.50 avg300=1.00 total=1\n"
    )

    assert reader.parse_pressure(text) == 2.5
    assert reader.parse_pressure("") is None


def test_a_count_is_read_from_vmstat():
    text = "nr_oom_kill 9\noom_kill 3\noom_kill_x 4\n"

    assert reader.parse_vmstat(text, "oom_kill") == 3
    assert reader.parse_vmstat(text, "none") is None


def test_a_process_in_state_d_is_parsed():
    text = STAT.format(pid=7, name="nvidia (a) b", state="D", user=3, system=4, started=99)

    assert reader.parse_stat(text) == Process(pid=7, started=99, name="nvidia (a) b", ticks=7)
    assert reader.parse_stat(text.replace(") D ", ") S ")) is None


@given(st.text())
def test_no_text_of_the_kernel_breaks_a_parser(text):
    assert isinstance(reader.parse_mounts(text), dict)
    assert reader.parse_pressure(text) is None or "full" in text
    assert reader.parse_vmstat(text, "oom_kill") is None or "oom_kill" in text
    assert reader.parse_stat(text) is None or " D " in text or ")D" in text


@given(st.text(alphabet="/ab ", max_size=20))
def test_every_path_belongs_to_a_mount(path):
    assert reader.read_only(path, {"/": frozenset({"ro"})}) is True


def test_only_processes_of_the_driver_are_reported(tmp_path):
    for pid, name in ((7, "nvidia-smi"), (8, "cp")):
        (tmp_path / str(pid)).mkdir()
        text = STAT.format(pid=pid, name=name, state="D", user=0, system=0, started=1)
        (tmp_path / str(pid) / "stat").write_text(text)

    found = reader.facts(Question((), ("nvidia*",), str(tmp_path)))

    assert [p.name for p in found.sleeping] == ["nvidia-smi"]


def test_a_kernel_without_the_facts_is_no_error(tmp_path):
    assert reader.facts(Question(("/",), ("*",), str(tmp_path))) == HostFacts(
        read_only={"/": False}
    )


def test_the_free_space_of_a_real_file_system_is_read(tmp_path):
    found = reader.space(str(tmp_path))

    assert found is not None
    assert 0 <= found.blocks <= 100
    assert 0 <= found.files <= 100
    assert reader.space(str(tmp_path / "gone")) is None


def test_the_real_clock_is_read():
    """As any user; where a filter forbids it, the clock is unknown."""
    clock = reader.read_clock()

    assert clock is None or abs(clock.offset_s) < 10


async def test_this_machine_gives_a_complete_reading(tmp_path):
    answer = await ask(Question(("/", str(tmp_path)), ("nvidia*",)), timeout_s=60)

    assert answer is not None
    assert [space.path for space in answer.spaces] == ["/", str(tmp_path)]
    assert answer.facts.read_only == {"/": False, str(tmp_path): False}
    assert answer.facts.oom_kills is not None
    assert answer.hangs is None


def lines(*objects):
    return [f"{text}\n".encode() for text in objects]


SPACE = '["/",50.0,50.0]'


def test_a_reader_that_falls_silent_at_a_path_hangs_there():
    parsed = parse(lines("[{},null,4]", SPACE), ("/", "/net", "/tmp"), late=True)

    assert parsed is not None
    assert (parsed.facts.oom_kills, parsed.hangs) == (4, "/net")
    assert parsed.spaces == (Space("/", 50.0, 50.0),)
    assert parsed.answered == ("/",)


def test_a_reader_that_ends_early_does_not_hang():
    """A system call filter killed it when it read the clock."""
    parsed = parse(lines("[]", SPACE), ("/",), late=False)
    broken = parse(lines("[]"), ("/",), late=False)

    assert parsed is not None
    assert broken is not None
    assert (parsed.hangs, parsed.clock, broken.hangs) == (None, None, None)


def test_the_clock_comes_last():
    text = "[true,0.5]"
    parsed = parse(lines("[]", "null", text), ("/gone",), late=False)

    assert parsed is not None
    assert (parsed.spaces, parsed.clock) == ((), Clock(synchronised=True, offset_s=0.5))
    assert parsed.answered == ("/gone",)  # with an error


@pytest.mark.parametrize(
    "answer", [[], [b"\n"], [b"garbage\n"], [b"[]\n", b"garbage\n"], [b"{}\n"]]
)
def test_an_invalid_answer_is_refused(answer):
    assert parse(answer, ("/",), late=False) is None


def test_a_silent_file_system_is_skipped_for_growing_times():
    avoided = Avoided()
    avoided.add("/net", 0)
    first = [avoided.holds("/net", t) for t in (599, 600)]
    avoided.add("/net", 600)
    second = [avoided.holds("/net", t) for t in (1799, 1800)]
    for _ in range(20):
        avoided.add("/net", 0)

    assert first == second == [True, False]
    assert not avoided.holds("/net", 4 * 3600)
    assert not avoided.holds("/", 0)


async def test_the_detector_reports_a_full_file_system():
    """Every real file system has less than 101 % of free space."""
    context = FakeContext(HostDetectorConfig(poll_s=0.01, disks=("/",), disk_free_percent=101))
    async with aclosing(HostDetector().watch(context)) as signals:
        signal = await anext(signals)

    assert (signal.code, signal.entity) == ("host.disk_full", "disk:/")
    assert signal.severity is Severity.WARNING


async def test_a_reader_that_cannot_start_gives_no_answer():
    """The host has no file descriptors left: no answer, no exception."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not the number of descriptors in use: there may be free ones between those.
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        answer = await ask(Question(("/",), ()), timeout_s=60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert answer is None

"""Traces of one's own, and what is said about a bad line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tmd.core.values.errors import ConfigError
from tmd.simulate.failures import FaultAssumptions
from tmd.simulate.trace_file import read
from tmd.simulate.values import Fault, FaultScope, Warned

CSV = """\
at_h,host,component,scope,repair_h,warned,notice_h
2,b7,GPU,,12,,
1,a3,NIC,worker,,,

3,b7,,host,,drain,0.5
"""


def read_back(folder: Path, text: str, name: str = "trace.csv") -> tuple[Fault, ...]:
    file = folder / name
    file.write_text(text)
    return read(file, 2, 1, FaultAssumptions(repair_h=24.0))


def test_hosts_stand_for_places_in_the_order_in_which_they_appear(tmp_path: Path) -> None:
    """Faults are sorted by time. The options give the repair or notice time that a line omits."""
    hour = 3600.0

    assert read_back(tmp_path, CSV) == (
        Fault(hour, 1, "NIC", FaultScope.WORKER, 24 * hour, Warned.NOT, hour),
        Fault(2 * hour, 0, "GPU", FaultScope.HOST, 12 * hour, Warned.NOT, hour),
        Fault(3 * hour, 0, "unknown", FaultScope.HOST, 24 * hour, Warned.DRAIN, hour / 2),
    )


def test_a_file_as_spreadsheets_write_it_is_read(tmp_path: Path) -> None:
    """It begins with a byte order mark."""
    assert len(read_back(tmp_path, "\ufeff" + CSV)) == 3


def test_json_lines_are_read_too(tmp_path: Path) -> None:
    text = '{"at_h": 1, "place": 1, "scope": "worker"}\n\n{"at_h": 2, "scope": "job"}\n'
    found = read_back(tmp_path, text, "trace.jsonl")

    assert [(f.place, f.scope) for f in found] == [(1, FaultScope.WORKER), (0, FaultScope.JOB)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("at_h,hots\n1,a\n", "line 1: there is no column 'hots'; there are at_h, place, host"),
        ("at_h,host\n1,a\n2\n", "line 3: 1 values for 2 columns"),
        ("at_h,host\n1,a\nx,a\n", "line 3: Expected `float`, got `str`"),
        ("at_h,host\n1,a\n-1,a\n", "line 3: at_h = -1.0: give hours of at least 0"),
        ("at_h,host\nnan,a\n", "line 2: at_h = nan"),
        ("at_h,host,scope\n1,a,rack\n", "line 2: Invalid enum value 'rack'"),
        ("at_h,host\n1,\n", "line 2: give either 'place' or 'host'"),
        ("at_h,place\n1,-2\n", "line 2: place = -2: places count from 0"),
        ("at_h,host\n1,a\n1,b\n1,c\n1,d\n", "line 5: d is host 4 of the file"),
        ("at_h,place\n1,2\n1,3\n", "line 3: place = 3, but the job has 3 hosts with its standbys"),
        (
            "at_h,host,scope,warned\n1,a,worker,drain\n",
            "line 2: only a fault that takes",
        ),
        ("at_h,host\n1,a\n2," + "b" * 131_073, "line 3: field larger than field limit (131072)"),
        ("h" * 131_073 + "\n1\n", "line 1: field larger than field limit (131072)"),
        ("at_h,host\n", "has no fault: give lines with at_h"),
        ("", "has no fault"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_back(tmp_path, text)
    assert str(tmp_path / "trace.csv") in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("line", ["{", "[1]", '{"at_h": 1, "places": 1}'])
def test_a_bad_line_of_json_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="line 2: "):
        read_back(tmp_path, '{"at_h": 1, "place": 0}\n' + line, "trace.json")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing.csv"):
        read(tmp_path / "nothing.csv", 2, 1, FaultAssumptions())

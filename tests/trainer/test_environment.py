"""Who has read a variable before `join()` changes it."""

import logging
import os
from collections.abc import Callable, Iterator

import pytest

from tmd.core.values.environment import true
from tmd.trainer.session import environment


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process as `tmd launch` starts it, of which `tmd.trainer` is imported now."""
    for name in environment.MAY_CHANGE:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("TMD_SOCKET", "/nowhere")
    environment.watch()
    yield
    environment.unwatch()


@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ["RANK"],
        lambda: os.environ.get("RANK", "-1"),
        lambda: os.getenv("RANK"),
    ],
    ids=["item", "get", "getenv"],
)
def test_a_script_that_read_another_value_is_told_where(
    caplog: pytest.LogCaptureFixture, read
) -> None:
    """By whichever way it reads; a second reading is not told again."""
    assert read() == read() == "7"
    with caplog.at_level(logging.WARNING):
        environment.settle({"RANK": "0", "WORLD_SIZE": "4"}, environment.unwatch())

    (line,) = caplog.messages
    assert f"{__file__}:{read.__code__.co_firstlineno} read RANK=7 before" in line
    assert "which set it to 0: read it after join()" in line
    assert os.environ["RANK"] == "0"
    assert type(os.environ) is os._Environ


def test_nobody_is_told_who_has_not_read_or_has_read_the_truth(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Or has only asked whether it is there."""
    assert "RANK" in os.environ
    assert os.environ["GROUP_RANK"] == "7"
    with caplog.at_level(logging.WARNING):
        environment.settle({"RANK": "0", "GROUP_RANK": "7"}, environment.unwatch())

    assert caplog.messages == []


@pytest.mark.parametrize(
    "copied",
    [
        lambda: {**os.environ},
        lambda: dict(os.environ),
        lambda: os.environ.copy(),
        lambda: {name: os.environ[name] for name in os.environ},
        lambda: dict(os.environ.items()),
    ],
    ids=["unpacked", "dict", "copy", "names", "items"],
)
def test_a_copy_of_all_is_no_reading_but_what_follows_is(
    caplog: pytest.LogCaptureFixture, copied: Callable[[], dict[str, str]]
) -> None:
    """As for the environment of a child process."""
    assert copied()["RANK"] == "7"
    assert next(name for name in os.environ if name == "RANK")  # left in the midst
    with caplog.at_level(logging.WARNING):
        assert os.environ["GROUP_RANK"] == "7"
        environment.settle({"RANK": "0", "GROUP_RANK": "0"}, environment.unwatch())

    (line,) = caplog.messages
    assert "read GROUP_RANK=7 before" in line


def test_the_true_place_counts_hosts_in_the_order_of_their_ranks() -> None:
    """Two workers on each of two hosts, not one host after the other."""
    hosts = ("b", "a", "b", "a")

    assert [true(rank, hosts)["GROUP_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert true(3, hosts)["GROUP_WORLD_SIZE"] == "2"
    assert true(3, hosts)["WORLD_SIZE"] == "4"

"""Records the reader of a variable before `join()` changes it."""

import logging
import os
from collections.abc import Callable, Iterator

import pytest

from tmd.trainer.session import environment


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process as `tmd launch` starts it, which has just imported `tmd.trainer`."""
    for name in (*environment.MAY_CHANGE, "WORLD_SIZE"):
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
def test_a_script_that_read_a_stale_value_is_warned_with_the_place(
    caplog: pytest.LogCaptureFixture, read
) -> None:
    """Each way of reading is noticed; a second read gives no second warning."""
    assert read() == read() == "7"
    with caplog.at_level(logging.WARNING):
        environment.settle({"RANK": "0", "WORLD_SIZE": "4"}, environment.unwatch())

    (line,) = caplog.messages
    assert f"{__file__}:{read.__code__.co_firstlineno} read RANK=7 before" in line
    assert "which set it to 0: read it after join()" in line
    assert os.environ["RANK"] == "0"
    assert type(os.environ) is os._Environ


def test_a_script_without_a_stale_value_is_not_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This includes scripts that only check for the variable."""
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
def test_a_copy_of_all_variables_is_no_read_but_a_later_access_is(
    caplog: pytest.LogCaptureFixture, copied: Callable[[], dict[str, str]]
) -> None:
    """A copy is needed for the environment of a child process."""
    assert copied()["RANK"] == "7"
    assert next(name for name in os.environ if name == "RANK")  # an iteration that is abandoned
    with caplog.at_level(logging.WARNING):
        assert os.environ["GROUP_RANK"] == "7"
        environment.settle({"RANK": "0", "GROUP_RANK": "0"}, environment.unwatch())

    (line,) = caplog.messages
    assert "read GROUP_RANK=7 before" in line

"""What a script does when its rank has moved away."""

from __future__ import annotations

import pytest

from tests.trainer.standalone import Voting
from tmd.trainer import Session


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def test_all_functions_are_called_although_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The worker is a standby then, and still useful."""
    hooks, called = Voting(), []
    session = Session(hooks)

    def fail() -> None:
        raise OSError("no space left")

    session.on_handover(lambda: called.append("first"))
    session.on_handover(fail)
    session.on_handover(lambda: called.append("last"))
    hooks.handovers.run()
    hooks.handovers.run()

    assert called == ["first", "last"] * 2
    assert "a function of session.on_handover failed" in caplog.text
    assert "no space left" in caplog.text

"""Being built, for the first time and as another rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tmd.core.values.model import Activity
from tmd.trainer.session.hooks import SHADOWS
from tmd.trainer.state_transfer.hindrance import Rebuild
from tmd.trainer.worker.warmup import ASLEEP, Warmup


class Groups:
    """A fabric whose script has built these."""

    def __init__(self) -> None:
        self.built = ["world"]
        self.worn: list[int] = []

    def sandbox(self, source: object, rank: int, size: int) -> None:
        self.worn.append(rank)


class Carries:
    """The order in which state and fit are called."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def taken(self) -> tuple[Any, ...]:
        self.asked.append("taken")
        return ()

    def give(self) -> None:
        self.asked.append("give")

    def let_go(self) -> None:
        self.asked.append("let go")

    def rest(self) -> None:
        self.asked.append("rest")


def asked(other: Rebuild) -> list[str]:
    """In which order, when a worker is to be built as ``other``."""
    warmup, fabric, carries = Warmup(), Groups(), Carries()
    warmup.by(lambda: carries.asked.append("build"))
    context: Any = SimpleNamespace(fabric=fabric, state=carries, fit=carries)
    warmup.become(other, context, 4)
    assert fabric.worn == [other.rank]
    warm = warmup.is_due(Activity.STANDBY)
    return [*carries.asked, "warm up" if warm else "go on"]


def test_only_who_survives_keeps_its_state() -> None:
    """A joiner's comes later: a copy of what it has would be memory for nothing."""
    assert asked(Rebuild(2)) == ["let go", "build", "rest", "warm up"]
    assert asked(Rebuild(2, cold=True)) == ["let go", "build", "go on"]
    kept = asked(Rebuild(2, cold=True, keeps=True))
    assert kept == ["taken", "let go", "build", "give", "go on"]


def test_a_function_that_makes_groups_is_told_so_at_once() -> None:
    """Not only when a standby is built again, in the midst of a loss."""
    fabric = SimpleNamespace(built=["world"])
    warmup = Warmup()
    warmup.by(lambda: fabric.built.append("mesh"))
    with pytest.raises(RuntimeError, match="has made process groups"):
        warmup.build(fabric)  # type: ignore[arg-type]


def test_whoever_is_asleep_says_that_it_is_a_shadow() -> None:
    """Also a joiner that waits for its state and walks on through the data: it may have rank 0."""
    assert ASLEEP <= SHADOWS

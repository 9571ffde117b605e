"""Attributes of trainers that build on the one of tmd: they move by name, or a warning says so."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.e2e.frameworks import need
from tmd.trainer.state.layout import flatten, unflatten


class Counting:
    """Has attributes as a trainer has."""

    moved_attributes: tuple[str, ...] = ()

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_a_value_that_has_moved_has_the_classes_of_the_one_before() -> None:
    need("transformers")
    from tmd.integrations.transformers.attributes import LONG, packed, unpacked

    many = [-0.0, *(1 / n for n in range(1, LONG + 2))]
    here = {"train": defaultdict(list, loss=[1.0]), "rest": 3, "sum": torch.zeros(2)}
    there = {"train": {"loss": [2.0, 3.0], "many": many}, "rest": 4, "sum": torch.ones(2)}
    layout, tensors = flatten(packed(there))
    assert len(tensors) == 1, "a rank is refused if it has other tensors than the one before"
    sent = unflatten(layout, iter(tensors))

    found = unpacked(sent, here)

    assert found["sum"].tolist() == [1.0, 1.0]
    assert found["rest"] == 4
    assert found["train"] == {"loss": [2.0, 3.0], "many": many}
    found["train"]["new"].append(1)  # still one that makes what is missing
    found["train"]["loss"].append(4.0)
    assert sent["train"]["loss"] == [2.0, 3.0]
    assert here["train"] == {"loss": [1.0]}


def test_an_attribute_that_changes_without_a_name_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not one that stays, even if it is no number, nor what is too large to compare at first."""
    need("transformers")
    from tmd.integrations.transformers.attributes import UnnamedAttributes

    trainer = Counting(seen=0, sums={"loss": [1.0]}, gap=math.nan, rows=[0] * 2000)
    trainer.total, trainer.kept = torch.zeros(1), torch.zeros(1)  # type: ignore[attr-defined]
    unnamed = UnnamedAttributes(trainer, set(vars(trainer)))
    with caplog.at_level(logging.WARNING, "tmd.trainer"):
        unnamed.warn()
        assert not caplog.messages
        trainer.seen, trainer.rows = 1, []  # type: ignore[attr-defined]
        trainer.sums["loss"].append(2.0)  # type: ignore[attr-defined]
        trainer.total += 1  # type: ignore[attr-defined]
        unnamed.warn()
        trainer.seen = 2  # type: ignore[attr-defined]
        unnamed.warn()

    names = [message.split()[0] for message in caplog.messages]
    assert sorted(names) == ["Counting.seen", "Counting.sums", "Counting.total"]


def test_a_name_that_no_attribute_has_is_refused() -> None:
    need("transformers")
    from tmd.integrations.transformers.attributes import refuse_missing

    trainer = Counting()
    trainer.moved_attributes = ("tokens",)
    with pytest.raises(ValueError, match=r"Counting.moved_attributes names 'tokens'"):
        refuse_missing(trainer)

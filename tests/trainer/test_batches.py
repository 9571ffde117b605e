"""What a script gets as its batch, and what it gets when the step is repeated."""

from __future__ import annotations

import sys
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from tmd.trainer.state.batches import SMALL, DrawnBatch
from tmd.trainer.state.data import Feed, Position
from tmd.trainer.state.placing import DataPlace


class Frozen(dict[str, Any]):
    """A dictionary that refuses writes."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


class Pair(namedtuple("Pair", "x size")):
    """A named tuple with a constructor of its own."""

    __slots__ = ()

    def __new__(cls, x: Any) -> Pair:
        return super().__new__(cls, x, len(x))


class Odd(tuple[Any, ...]):
    """A tuple that cannot be built from its elements."""

    __slots__ = ()

    def __new__(cls, one: Any, other: Any) -> Odd:
        return super().__new__(cls, (one, other))


def cyclic() -> dict[str, Any]:
    batch: dict[str, Any] = {"x": torch.ones(2), "more": []}
    batch["more"] += [batch, batch]
    return batch


BATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda: torch.ones(2), lambda b: b),
    "dictionary that refuses writes": (lambda: Frozen(x=torch.ones(2)), lambda b: b["x"]),
    "list in it": (lambda: Frozen(x=[torch.ones(2)]), lambda b: b["x"][0]),
    "mapping": (lambda: UserDict(x=[torch.ones(2)]), lambda b: b["x"][0]),
    "named tuple": (lambda: Pair(torch.ones(2)), lambda b: b.x),
    "list in a named tuple": (lambda: Pair([torch.ones(2)]), lambda b: b.x[0]),
    "packed": (lambda: pack_sequence([torch.ones(2)]), lambda b: b.data),
    "tuple of its own": (lambda: Odd([torch.ones(2)], 1), lambda b: b[0][0]),
    "contains itself": (cyclic, lambda b: b["x"]),
    "mixed": (lambda: [1, 2, [3, "x", torch.ones(2)], 4], lambda b: b[2][2]),
    "expanded": (lambda: torch.ones(1).expand(2), lambda b: b),
    "not a number": (lambda: torch.tensor([1.0, float("nan")]), lambda b: b[:1]),
}


@pytest.mark.parametrize(("make", "tensor"), BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_of_any_type_is_given_and_given_again(
    make: Callable[[], Any], tensor: Callable[[Any], Tensor]
) -> None:
    """At first it is the loader's own object. A change in place does not last."""
    batch = make()
    drawn = DrawnBatch(batch, copied=False)
    first = drawn.given()
    values = tensor(first).clone()
    if tensor(first).stride() != (0,):
        tensor(first).zero_()
    again = drawn.given()
    second = drawn.given()

    assert first is batch
    assert type(again) is type(second) is type(batch)
    assert torch.equal(tensor(again), values)
    assert torch.equal(tensor(second), values)


def test_an_entry_that_was_taken_out_is_there_again() -> None:
    """Also a number in a list, or a list in a tuple."""
    drawn = DrawnBatch({"x": [1, 2], "y": ([torch.ones(2), 3], 4)}, copied=False)
    for _ in range(3):
        batch = drawn.given()
        found = batch.pop("x"), [*batch["y"][0]]
        found[0].pop()
        batch["y"][0].clear()

        assert found[0] == [1]
        assert found[1][1] == 3


def test_views_of_the_same_memory_are_such_views_again() -> None:
    """Inputs and targets of a language model are: a change of one is a change of the other."""
    memory = torch.arange(4.0)
    drawn = DrawnBatch((memory[:-1], memory[1:]), copied=False)
    found = []
    for _ in range(2):
        inputs, targets = drawn.given()
        inputs.mul_(2)
        found.append(targets.tolist())

    assert found[0] == found[1] == [2.0, 4.0, 3.0]


@pytest.mark.parametrize("change", [lambda x: x.unsqueeze_(0), lambda x: x.resize_(7)])
def test_a_tensor_of_another_shape_comes_as_it_was(change: Callable[[Tensor], object]) -> None:
    drawn = DrawnBatch([torch.arange(3.0)], copied=False)
    for _ in range(3):
        (given,) = drawn.given()
        assert given.tolist() == [0.0, 1.0, 2.0]
        change(given)


def test_a_repeated_step_finds_no_gradient_at_its_batch() -> None:
    """As for an adversarial example. A second one would be added to it."""
    drawn = DrawnBatch(torch.ones(2), copied=False)
    for _ in range(2):
        given = drawn.given()
        before = given.grad
        given.requires_grad_()
        given.sum().backward()

        assert before is None
        assert given.grad is not None


@pytest.mark.parametrize(
    "batch",
    [
        [list(range(1000)) for _ in range(10)],
        {"ids": tuple(range(1000)), "names": ["x"] * 1000},
        {str(n): n for n in range(1000)},
    ],
)
def test_plain_values_are_not_looked_at_one_by_one(batch: Any) -> None:
    """A batch may be lists of thousands of numbers, in every step."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        drawn = DrawnBatch(batch, copied=False)
        drawn.given()
        again = drawn.given()
    finally:
        sys.setprofile(None)

    assert again == batch
    assert calls < 200


LARGE = SMALL // 4 + 1
"""Elements of a tensor that is too large to be copied in each step."""


class Large:
    """Draws its batches anew each time, and counts them."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(6):
            self.drawn += 1
            yield torch.full((LARGE,), float(number))


def feed_of(loader: Any) -> Feed:
    return Feed(loader, 0, lambda: 1, lambda: DataPlace(0, 1))


def broken(feed: Feed, step: int) -> list[float]:
    """First elements of a batch that is changed, and of the same one in the repeated step."""
    found = []
    for _ in range(2):
        batch = feed.next(step)
        found.append(float(batch[0]))
        batch.add_(0.5)
        feed.rewind()
    return found


def commit(feed: Feed, step: int, *, change: bool) -> None:
    batch = feed.next(step)
    if change:
        batch.add_(0.5)
    feed.commit()


@pytest.mark.parametrize("change", [False, True])
def test_a_large_batch_is_drawn_again_only_if_its_change_is_the_first(change: bool) -> None:
    """From then on there are copies, so that no step costs a pass over the loader."""
    loader = Large()
    feed = feed_of(loader)
    for step in range(2):
        commit(feed, step, change=change)
    counts, seen = [loader.drawn], []
    for step in (2, 3):
        seen.append(broken(feed, step))
        commit(feed, step, change=False)
        counts.append(loader.drawn)

    assert seen == [[2.0, 2.0], [3.0, 3.0]]
    assert counts == ([2, 3, 4] if change else [2, 6, 7])
    assert feed.position == Position(0, 4)


def test_a_function_that_makes_an_iterator_is_called_again() -> None:
    """Its batches need no copies in each step."""
    loader = Large()
    feed = feed_of(lambda place: iter(loader))
    commit(feed, 0, change=False)
    seen = broken(feed, 1)

    assert seen == [1.0, 1.0]
    assert loader.drawn == 4


@pytest.mark.parametrize("make", [iter, list, lambda loader: lambda place, held=[*loader]: held])
def test_a_loader_that_cannot_draw_anew_is_not_asked_to(
    make: Callable[[Any], Any],
) -> None:
    """A generator would go on where it is, and end early. A list has only the changed batch."""
    feed = feed_of(make(Large()))
    seen = []
    for step in range(6):
        seen.append(broken(feed, step) if step in (3, 4) else [step, step])
        commit(feed, step, change=step in (3, 4))

    assert seen == [[step, step] for step in range(6)]
    with pytest.raises(StopIteration):
        feed.next(6)


def test_a_batch_that_torch_cannot_compare_is_given_again() -> None:
    tensor = torch.ones(2, device="meta")
    drawn = DrawnBatch([tensor], copied=True)
    first, second = drawn.given(), drawn.given()

    assert first[0] is second[0] is tensor


def test_a_zero_that_was_negated_is_put_back() -> None:
    """It equals the other one, and has other bits."""
    drawn = DrawnBatch([torch.zeros(1)], copied=True)
    drawn.given()[0].neg_()

    assert str(drawn.given()[0]) == "tensor([0.])"

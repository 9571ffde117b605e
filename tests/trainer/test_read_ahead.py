"""A loader of Accelerate gives each batch under the random numbers of its own step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from tests.e2e.frameworks import need
from tmd.trainer.state.data import Feed, Position
from tmd.trainer.state.placing import DataPlace

SIZE, BATCH, BATCHES = 30, 4, 8
"""The last batch is padded with samples of the first one."""


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The module with the loaders. The state of Accelerate in this process is new afterwards."""
    need("accelerate")
    state = import_module("accelerate.state")
    yield import_module("accelerate.data_loader")
    for each in (state.GradientState, state.AcceleratorState, state.PartialState):
        each._reset_state()


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """The same samples; their number is not known."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return ((torch.tensor(float(index)),) for index in range(SIZE))


def masked(rows: list[Any]) -> list[torch.Tensor]:
    """Draws, as a collator does that masks tokens."""
    (samples,) = default_collate(rows)
    return [samples, torch.rand(len(samples))]


def prepared(accelerate: Any, data: object = None, **settings: Any) -> DataLoader[object]:
    """As ``Accelerator.prepare`` makes it for rank 1 of two. It reads every other batch."""
    accelerate.PartialState(cpu=True)
    torch.manual_seed(5)  # the sampler keeps it for its order
    shuffle = data is None
    data = TensorDataset(torch.arange(float(SIZE))) if data is None else data
    loader: DataLoader[object] = accelerate.prepare_data_loader(
        DataLoader(data, batch_size=BATCH, shuffle=shuffle, collate_fn=masked),  # type: ignore[arg-type]
        num_processes=2,
        process_index=1,
        use_seedable_sampler=True,
        **settings,
    )
    return loader


def feed_of(loader: Any, call: int = 0) -> Feed:
    return Feed(loader, call, lambda: 1, lambda: DataPlace(1, 2))


def numbers(feed: Feed, step: int, count: int) -> list[list[float]]:
    batches = feed.several(step, count, partial=False)
    feed.commit()
    return [number.tolist() for batch in batches for number in batch]


@pytest.mark.parametrize("streams", [False, True], ids=["with a length", "without"])
def test_a_joiner_gets_the_random_numbers_of_its_rank(accelerate: Any, streams: bool) -> None:
    """Steps of several batches, and evaluations that count as steps, so that the number of a batch
    is not that of its step."""
    data = Stream() if streams else None
    settings = {"dispatch_batches": False, "data": data}
    straight = feed_of(prepared(accelerate, **settings), call=1)
    steps = [numbers(straight, step, 2) for step in (10, 12)]
    joiner = feed_of(prepared(accelerate, **settings), call=1)
    joiner.seek(Position(1, 2))

    assert numbers(joiner, 12, 2) == steps[1]


def test_the_loader_shows_the_script_what_it_shows_without_tmd(accelerate: Any) -> None:
    """Where it is, how many samples the last batch lacks, and which epoch comes next."""

    def shown(loader: Any) -> tuple[object, ...]:
        state = loader.gradient_state
        active = state.active_dataloader is loader
        return active, state.end_of_dataloader, state.remainder, loader.iteration

    theirs, ours = prepared(accelerate), prepared(accelerate)
    epochs: list[tuple[Any, Any]] = []
    for epoch in range(2):
        usual = [(batch[0].tolist(), shown(theirs)) for batch in theirs]
        usual.append(([], shown(theirs)))
        feed = feed_of(ours, epoch)
        found = [(feed.next(step)[0].tolist(), shown(ours)) for step in range(BATCHES // 2)]
        with pytest.raises(StopIteration):
            feed.next(BATCHES // 2)
        feed.close()
        found.append(([], shown(ours)))
        epochs.append((usual, found))

    assert [found for _, found in epochs] == [usual for usual, _ in epochs]
    ends = [shows[1] for _, shows in epochs[0][1]]
    assert ends == [False, False, False, True, False]
    assert epochs[0][1][0] != epochs[1][1][0]


def test_batches_go_to_the_device_of_the_loader(accelerate: Any) -> None:
    loader = prepared(accelerate, put_on_device=True, device=torch.device("meta"))

    (samples, _) = feed_of(loader).next(0)

    assert samples.device.type == "meta"


def test_batches_that_are_left_out_stay_so(accelerate: Any) -> None:
    """Of ``skip_first_batches``, and when the loader is iterated again."""
    whole = [batch[0].tolist() for batch in prepared(accelerate)]
    feed = feed_of(accelerate.skip_first_batches(prepared(accelerate), 2))
    first = numbers(feed, 0, 1)
    feed.seek(Position(0, 1))

    assert [first[0], numbers(feed, 1, 1)[0]] == whole[2:]


def test_batches_that_rank_0_reads_for_all_are_refused(accelerate: Any) -> None:
    """Also those that are given to ``session.batches`` itself."""
    feed = feed_of(prepared(accelerate, data=Stream(), dispatch_batches=True, put_on_device=True))

    with pytest.raises(ValueError, match="dispatch_batches=False"):
        feed.next(0)


def test_a_loader_with_an_iterator_of_its_own_is_named(
    accelerate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It may read ahead, too, and tmd cannot know."""

    class Named(accelerate.DataLoaderShard):  # type: ignore[misc]
        def __iter__(self) -> Iterator[object]:
            yield from super().__iter__()

    plain: Any = prepared(accelerate)
    loader = Named(plain.dataset, batch_sampler=plain.batch_sampler, collate_fn=masked)

    with caplog.at_level(logging.WARNING, logger="tmd.trainer"):
        feed_of(loader).next(0)

    assert "Named has an iterator of its own" in caplog.text
    assert "base_dataloader" in caplog.text

"""Loaders that divide the data: placed anew where that can be done, refused where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from tmd.trainer.state.data import Feed
from tmd.trainer.state.evaluations import Evaluations
from tmd.trainer.state.placing import DataPlace, placed

DATA = list(range(12))


class Shard(BatchSampler):
    """Divided as Accelerate's ``BatchSamplerShard``: every so many batches are this process's."""

    def __init__(self, inner: BatchSampler, processes: int, index: int) -> None:
        self.batch_sampler, self.num_processes, self.process_index = inner, processes, index

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):
            if number % self.num_processes == self.process_index:
                yield batch


class Fixed(list[int]):
    """Keeps the rank for which it was cut, as torchtitan's loaders do."""

    dp_rank = 1


class Split(list[int]):
    """As ``datasets.distributed.split_dataset_by_node`` leaves it."""

    class Node:
        rank = 1

    _distributed = Node()


def shard(processes: int = 3) -> DataLoader[int]:
    return DataLoader(
        DATA,  # type: ignore[arg-type]
        batch_sampler=Shard(BatchSampler(range(12), 2, drop_last=False), processes, 1),
    )


def numbers(loader: object) -> list[list[int]]:
    return [batch.tolist() for batch in loader]  # type: ignore[attr-defined]


def init(number: int, rank: int) -> None:
    """Stands for a function of a script."""


def test_processes_of_a_loader_are_told_the_rank_held_now() -> None:
    """If ``worker_init_fn`` was given a rank when the loader was built."""
    loader: DataLoader[Any] = DataLoader(DATA, worker_init_fn=partial(init, rank=7))  # type: ignore[arg-type]
    for part in (2, 0):
        placed(loader, DataPlace(part, 3))

        assert isinstance(loader.worker_init_fn, partial)
        assert loader.worker_init_fn.keywords == {"rank": part}


def test_a_shard_is_the_rank_s_own_wherever_it_was_built() -> None:
    loader = shard()
    assert numbers(placed(loader, DataPlace(2, 3))) == [[4, 5], [10, 11]]
    assert numbers(placed(loader, DataPlace(0, 3))) == [[0, 1], [6, 7]]


def test_a_sampler_inside_a_shard_is_found() -> None:
    """Accelerate may divide by processes what a DistributedSampler divides among ranks."""
    inner = DistributedSampler(DATA, 3, 1, shuffle=False)  # type: ignore[arg-type]
    batches = Shard(BatchSampler(inner, 2, drop_last=False), 1, 0)
    loader: DataLoader[int] = DataLoader(DATA, batch_sampler=batches)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Shard divides the data into 1 parts, but 3"):
        placed(loader, DataPlace(2, 3))
    batches.num_processes = 3
    placed(loader, DataPlace(2, 3))
    assert inner.rank == 2


def test_a_shard_that_divides_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match="divides the data into 4 parts, but 3 ranks"):
        placed(shard(4), DataPlace(0, 3))


@pytest.mark.parametrize("data", [Fixed(DATA), Split(DATA)], ids=["loader", "dataset"])
def test_data_that_were_cut_for_a_rank_are_refused_with_the_remedy(data: list[int]) -> None:
    """On every rank and from the start, not only on the joiner that would train on wrong ones."""
    loader = data if isinstance(data, Fixed) else DataLoader(data)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fixed for rank 1, but.*lambda place"):
        placed(loader, DataPlace(1, 3))
    assert placed(loader, DataPlace(0, 1)) is loader, "alone there is no other part"


class Stream(IterableDataset[int]):
    """Of a script's own, which keeps the rank for which it was built."""

    def __init__(self, rank: int, **number: int) -> None:
        self.rank = rank
        vars(self).update(number)

    def __iter__(self) -> Iterator[int]:
        return iter(DATA[self.rank :: 3])


class Cut(Sampler[int]):
    """The same for the places of a map-style data set."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.places, self.rank, self.world_size = DATA[rank::world_size], rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)


class Around(Sampler[int]):
    """A sampler that takes places from another one."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(1, world_size=3)),
        DataLoader(Stream(1, num_shards=3)),
        DataLoader(DATA, sampler=Cut(1, 3)),  # type: ignore[arg-type]
        DataLoader(DATA, sampler=Around(Cut(1, 3))),  # type: ignore[arg-type]
    ],
)
def test_streams_and_samplers_that_keep_a_rank_are_refused_too(loader: DataLoader[int]) -> None:
    with pytest.raises(ValueError, match=r"fixed for rank 1, but.*lambda place"):
        placed(loader, DataPlace(1, 3))


@pytest.mark.parametrize("number", [{}, {"num_shards": 64}, {"world_size": 1}, {"num_ranks": 1}])
def test_a_stream_with_a_rank_of_something_else_is_left_alone(number: dict[str, int]) -> None:
    """That of a tensor, say, with a number of files, or one that is not divided."""
    loader = DataLoader(Stream(1, **number))
    assert placed(loader, DataPlace(1, 3)) is loader


class Late(IterableDataset[int]):
    """Reads the rank whenever it is iterated."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[int]:
        self.rank, self.world_size = self._read(), 3
        return iter(DATA[self.rank :: 3])


def test_a_stream_that_reads_the_rank_when_it_is_iterated_is_refused_at_once() -> None:
    """Of training: nobody knows whether it reads it again."""
    feed = Feed(DataLoader(Late(lambda: 1)), 0, lambda: 0, lambda: DataPlace(1, 3))
    with pytest.raises(ValueError, match=r"Late are fixed for rank 1, but.*lambda place"):
        feed.next(0)
    built = Feed(lambda place: DataLoader(Late(lambda: 1)), 0, lambda: 0, lambda: DataPlace(1, 3))
    assert [int(built.next(step)) for step in range(2)] == DATA[1::3][:2]


def test_what_was_placed_once_is_never_refused_later() -> None:
    """The loader of an evaluation, which is placed before each one, and again if a rank is lost."""
    ranks = iter([1, 2])
    loader = DataLoader(Late(lambda: next(ranks)))
    for rank in (1, 2):
        assert placed(loader, DataPlace(rank, 3)) is loader
        assert [int(each) for each in loader] == DATA[rank::3]
    with pytest.raises(ValueError, match="fixed for rank 1"):
        placed(DataLoader(Stream(1, world_size=3)), DataPlace(1, 3))


class Keeps(Late):
    """Reads the rank once."""

    def __iter__(self) -> Iterator[int]:
        if not hasattr(self, "rank"):
            return super().__iter__()
        return iter(DATA[self.rank :: 3])


@pytest.mark.parametrize(("stream", "warned"), [(Keeps, True), (Late, False)])
def test_an_evaluation_with_the_data_of_another_rank_is_reported(
    stream: type[Late], warned: bool
) -> None:
    """Once the worker has run one after a move. It could be told from others no earlier."""
    ranks = [1, 1, 2, 2, 2]
    read = iter(ranks)
    loader = DataLoader(stream(lambda: next(read)))
    found = list[str]()
    evaluations = Evaluations(lambda rank_kept: found.append(rank_kept))
    counts = []
    for rank in ranks:
        evaluations.placed(loader, DataPlace(rank, 3), 5)
        counts.append(len(found))
        list(loader)

    assert counts == [0, 0, 0, int(warned), int(warned)]
    assert all("kept rank 1 although" in each for each in found)


def test_what_a_step_has_drawn_from_is_never_refused_later() -> None:
    """The script may use the data set elsewhere, too."""
    stream = Late(lambda: 1)
    loader = DataLoader(stream, num_workers=1)
    for call in range(2):
        feed = Feed(loader, call, lambda: 0, lambda: DataPlace(1, 3))
        assert int(feed.next(0)) == DATA[1]
        list(stream)
        assert stream.rank == 1


class Batches:
    """Iterates by index, and can be called."""

    def __getitem__(self, index: int) -> int:
        return DATA[index]

    def __call__(self, place: DataPlace) -> list[int]:
        raise AssertionError("it is a loader itself")


def test_only_what_is_no_loader_itself_is_called() -> None:
    loader: Any = Batches()
    assert placed(loader, DataPlace(0, 1)) is loader
    assert placed(lambda place: DATA[place.part :: place.parts], DataPlace(1, 3)) == [1, 4, 7, 10]


class Broadcasting(DataLoader[int]):
    """As Accelerate's loader with a generator that all ranks share."""

    rng_types: ClassVar[list[str]] = ["generator"]


def test_a_loader_that_broadcasts_its_generator_is_refused_with_the_remedy() -> None:
    """A joiner iterates alone: nobody would answer, and it would shuffle in another order."""
    loader: Any = Broadcasting(DATA)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"use_seedable_sampler=True"):
        placed(loader, DataPlace(0, 3))
    assert placed(loader, DataPlace(0, 1)) is loader

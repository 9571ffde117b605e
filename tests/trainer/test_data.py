"""The same batch again when a step is repeated, and the data position of a joiner."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.e2e.frameworks import need
from tests.trainer.standalone import Voting
from tmd.trainer.session.session import Session
from tmd.trainer.state.data import Feed, Position
from tmd.trainer.state.placing import DataPlace
from tmd.trainer.state.step_sampler import StepSampler


def feed_of(loader: Iterable[object], place: tuple[int, int] = (0, 1)) -> Feed:
    return Feed(loader, 0, lambda: 1, lambda: DataPlace(*place))


def drawn(feed: Feed, steps: range) -> list[list[float]]:
    return [torch.as_tensor(feed.next(step)[0]).tolist() for step in steps if not _commit(feed)]


def _commit(feed: Feed) -> None:
    feed.commit()


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(32.0))


def shuffled() -> DataLoader[object]:
    return DataLoader(dataset(), batch_size=4, shuffle=True)


def sampled() -> DataLoader[object]:
    return DataLoader(dataset(), batch_size=4, sampler=StepSampler(32, 4, 8, lambda: (0, 1)))


class Augmented(TensorDataset):
    """Each sample with a random number, as from a random crop."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        assert type(index) is int
        return (torch.stack((self.tensors[0][index], torch.rand(()))),)


def augmented(**settings: Any) -> DataLoader[object]:
    data = Augmented(torch.arange(32.0))
    sampler = StepSampler(32, 4, 8, lambda: (0, 1))
    return DataLoader(data, batch_size=4, sampler=sampler, **settings)


def augmented_by_processes() -> DataLoader[object]:
    return augmented(num_workers=2)


def augmented_by_processes_that_stay() -> DataLoader[object]:
    return augmented(num_workers=1, persistent_workers=True)


def augmented_in_another_order() -> DataLoader[object]:
    return DataLoader(Augmented(torch.arange(32.0)), batch_size=4, shuffle=True, num_workers=2)


def in_another_order_by_processes_that_stay() -> DataLoader[object]:
    return DataLoader(
        Augmented(torch.arange(32.0)),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )


def iterable() -> Iterable[list[torch.Tensor]]:
    class Ones:
        def __iter__(self) -> Iterator[list[torch.Tensor]]:
            return iter([[torch.full((2,), float(i))] for i in range(8)])

    return Ones()


def with_workers() -> DataLoader[object]:
    return DataLoader(dataset(), batch_size=4, shuffle=True, num_workers=1)


def shuffled_by_its_own_generator() -> DataLoader[object]:
    own = torch.Generator().manual_seed(3)
    return DataLoader(dataset(), batch_size=4, shuffle=True, generator=own)


def augmented_by_its_own_generator() -> DataLoader[object]:
    """The generator also seeds the processes."""
    own = torch.Generator().manual_seed(3)
    data = Augmented(torch.arange(32.0))
    return DataLoader(data, batch_size=4, shuffle=True, num_workers=1, generator=own)


LOADERS = (
    shuffled,
    sampled,
    augmented,
    augmented_by_processes,
    augmented_by_processes_that_stay,
    augmented_in_another_order,
    in_another_order_by_processes_that_stay,
    iterable,
    with_workers,
    shuffled_by_its_own_generator,
    augmented_by_its_own_generator,
)


def stateful(**settings: Any) -> DataLoader[object]:
    """A loader with a state of its own. Random numbers are drawn in its process, too."""
    need("torchdata")
    with_state = import_module("torchdata.stateful_dataloader")
    data = Augmented(torch.arange(32.0))
    torch.manual_seed(5)  # its sampler draws a seed when it is built
    loader: DataLoader[object] = with_state.StatefulDataLoader(
        data, batch_size=4, shuffle=True, **settings
    )
    return loader


def stateful_by_processes() -> DataLoader[object]:
    return stateful(num_workers=2)


def accelerated() -> DataLoader[object]:
    """Its loader has one of torch inside, with the processes."""
    need("accelerate")
    of_accelerate = import_module("accelerate.data_loader")
    made: DataLoader[object] = of_accelerate.DataLoaderShard(
        Augmented(torch.arange(32.0)),
        batch_size=4,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
    )
    return made


def seedable() -> Any:
    """Accelerate's sampler seeds the generator, which also seeds the processes."""
    need("accelerate")
    of_accelerate = import_module("accelerate.data_loader")
    own = torch.Generator().manual_seed(3)
    data = Augmented(torch.arange(32.0))
    plain = DataLoader(data, batch_size=4, shuffle=True, num_workers=1, generator=own)
    torch.manual_seed(5)  # its sampler keeps this seed
    settings = {"num_processes": 1, "process_index": 0, "use_seedable_sampler": True}
    return of_accelerate.prepare_data_loader(plain, **settings)


def test_a_sampler_that_seeds_the_generator_does_not_change_the_seed_of_processes() -> None:
    """A joiner has not iterated it."""
    loader, joiner = seedable(), seedable()
    for call in range(2):
        whole(Feed(loader, call, lambda: 1, lambda: DataPlace(0, 1)), 8)
    joiner.set_epoch(2)
    third = [
        drawn(Feed(each, 2, lambda: 1, lambda: DataPlace(0, 1)), range(8))
        for each in (loader, joiner)
    ]

    assert third[0] == third[1]


class Wrapping(DataLoader[Any]):
    """Puts an iterator of its own around that of torch, as loaders of graphs do."""

    def _get_iterator(self) -> Any:
        return Wrapped(super()._get_iterator())


class Wrapped:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._inner._reset(loader, first_iter)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._inner)


def wrapping() -> DataLoader[object]:
    data = Augmented(torch.arange(32.0))
    return Wrapping(data, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(
    "make", [in_another_order_by_processes_that_stay, accelerated, wrapping, stateful_by_processes]
)
def test_processes_that_stay_begin_anew_with_each_call(
    make: Callable[[], DataLoader[object]],
) -> None:
    """A joiner's have not drawn what they have drawn before."""
    loader = make()
    drawn(feed_of(loader), range(8))
    second = Feed(loader, 1, lambda: 1, lambda: DataPlace(0, 1))
    joiner = Feed(make(), 1, lambda: 1, lambda: DataPlace(0, 1))

    assert drawn(second, range(8)) == drawn(joiner, range(8))


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("make", [*LOADERS, stateful, stateful_by_processes])
def test_a_joiner_reaches_the_same_data_position(make: object, index: int) -> None:
    """After ``seek`` a fresh feed gives the same batches as the old one."""
    assert callable(make)
    straight = drawn(feed_of(make()), range(8))
    joiner = feed_of(make())
    drawn(joiner, range(2))
    joiner.seek(Position(0, index))
    torch.rand(3)

    assert drawn(joiner, range(index, 8)) == straight[index:]


def test_the_generator_of_a_loader_gives_each_call_an_order_of_its_own() -> None:
    """The first is that of the loader alone. A joiner that skips it has that of the second call."""
    loader, alone = shuffled_by_its_own_generator(), shuffled_by_its_own_generator()
    orders = [
        drawn(Feed(loader, call, lambda: 1, lambda: DataPlace(0, 1)), range(8)) for call in (0, 1)
    ]
    joiner = shuffled_by_its_own_generator()
    drawn(feed_of(joiner), range(3))
    later = drawn(Feed(joiner, 1, lambda: 1, lambda: DataPlace(0, 1)), range(8))

    assert orders[0] == [batch.tolist() for (batch,) in alone]
    assert orders[0] != orders[1] == later


def test_a_joiner_has_the_order_of_a_script_that_seeds_before_each_call() -> None:
    """It runs the code before an earlier call, but opens no loader for it."""

    def orders(*opened: int) -> list[list[list[float]]]:
        own = torch.Generator()
        found: list[list[list[float]]] = []
        loader = DataLoader(dataset(), batch_size=4, shuffle=True, generator=own)
        for call in range(3):
            own.manual_seed(100 + call)
            if call in opened:
                feed = Feed(loader, call, lambda: 1, lambda: DataPlace(0, 1))
                drawn(feed, range(8))
                feed.seek(Position(call, 0))  # a repeat opens the loader again
                found.append(drawn(feed, range(8)))
        return found

    assert orders(0, 1, 2)[1:] == orders(1, 2)
    assert orders(0, 1, 2)[2:] == orders(2)


def test_the_state_of_a_loader_would_not_reach_the_same_data() -> None:
    """Why batches are drawn and dropped: the state holds no random numbers of loader processes."""
    straight = stateful(num_workers=1)
    batches = iter(straight)
    for _ in range(3):
        next(batches)
    state = straight.state_dict()  # type: ignore[attr-defined]
    (expected,) = next(batches)
    again = stateful(num_workers=1)
    again.load_state_dict(state)  # type: ignore[attr-defined]
    (found,) = next(iter(again))

    assert torch.equal(found[:, 0], expected[:, 0])
    assert not torch.equal(found[:, 1], expected[:, 1])


def test_a_loader_that_begins_elsewhere_only_once_is_refused() -> None:
    """Iterated again it begins at its start. A function that loads the state is accepted."""
    straight = drawn(feed_of(stateful()), range(8))
    before = stateful()
    feed = feed_of(before)
    drawn(feed, range(2))
    state = before.state_dict()  # type: ignore[attr-defined]

    def loaded(place: DataPlace | None = None) -> DataLoader[object]:
        loader = stateful()
        loader.load_state_dict(state)  # type: ignore[attr-defined]
        return loader

    with pytest.raises(ValueError, match="StatefulDataLoader was given a state by load_state_dict"):
        feed_of(loaded()).next(0)
    joiner = Feed(loaded, 0, lambda: 1, lambda: DataPlace(0, 1))
    drawn(joiner, range(2))
    joiner.seek(Position(0, 1))
    indices = [[pair[0] for pair in batch] for batch in drawn(joiner, range(1, 6))]  # type: ignore[index]
    assert indices == [[pair[0] for pair in batch] for batch in straight[3:]]  # type: ignore[index]


def test_a_repeated_step_gets_its_batches_again() -> None:
    """After a rewind the same tensors since the last commit come again."""
    feed = feed_of(shuffled())
    feed.next(0)
    feed.commit()
    first = [feed.next(1), feed.next(1)]
    feed.rewind()

    assert feed.next(1)[0] is first[0][0]
    assert feed.next(1)[0] is first[1][0]
    assert feed.position == Position(0, 1)


def test_each_batch_of_a_step_has_random_numbers_of_its_own() -> None:
    """Of a loader in this process: as without tmd. A repeated step has the same ones."""
    feed = feed_of(augmented())
    seen: list[list[float]] = []
    for step in (0, 1, 1):
        feed.rewind() if seen[4:] else feed.commit()
        batches = feed.several(step, 4, partial=False)
        seen += [batch[0][:, 1].tolist() for batch in batches]

    assert len({tuple(numbers) for numbers in seen}) == 8
    assert seen[4:8] == seen[8:]


def test_batches_that_were_too_few_for_a_step_are_gone_with_their_call() -> None:
    """Ten batches in fours: two are left over, and belong to no step."""
    feed = feed_of(list(range(10)))
    for step in range(2):
        feed.several(step, 4, partial=False)
        feed.commit()
    with pytest.raises(StopIteration):
        feed.several(2, 4, partial=False)
    before = feed.drawn
    feed.close()

    assert before
    assert not feed.drawn
    assert feed.position == Position(1)


def test_loader_processes_draw_different_numbers_for_each_batch_and_rank() -> None:
    """Their own init function runs, and what it sets is restored afterwards."""
    started = torch.zeros(1).share_memory_()
    settings = {"num_workers": 1, "worker_init_fn": lambda number: started.add_(1)}
    loader = augmented(**settings)
    first = drawn(feed_of(loader), range(8))
    other = drawn(Feed(augmented(**settings), 0, lambda: 2, lambda: DataPlace(0, 1)), range(8))
    later = drawn(Feed(augmented(**settings), 1, lambda: 1, lambda: DataPlace(0, 1)), range(8))
    drawn_at: list[Any] = [*first, *other, *later]
    numbers = [pair[1] for batch in drawn_at for pair in batch]

    assert len(set(numbers)) == len(numbers) == 3 * 8 * 4
    assert started.item() == 3
    assert loader.worker_init_fn is settings["worker_init_fn"]


class Traced(torch.utils.data.Dataset[torch.Tensor]):
    """Records which process has loaded which sample; sample ``bad`` does not exist."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise ValueError("no such sample")
        return torch.tensor([index, os.getpid()])


class InOrder(StepSampler):
    """Batch n has only sample n."""

    def __iter__(self) -> Iterator[int]:
        indices = super().__iter__()
        course = self.latest
        assert course is not None
        return (course.next - 1 for _ in indices)


@pytest.mark.parametrize(
    ("bad", "taken", "stay"),
    [
        pytest.param(-1, 2, True, id="they go on"),
        pytest.param(3, 2, False, id="a batch was loaded ahead that cannot be"),
        pytest.param(-1, 8, False, id="they have come to the end"),
    ],
)
def test_loader_processes_jump_to_another_batch(bad: int, taken: int, stay: bool) -> None:
    """Batches loaded ahead are dropped; if that is impossible, new processes are started."""
    sampler = InOrder(8, 1, 8, lambda: (0, 1))
    feed = feed_of(DataLoader(Traced(bad), batch_size=1, sampler=sampler, num_workers=1))
    before = {int(feed.next(step)[0][1]) for step in range(taken)}
    feed.seek(Position(0, 5))
    after = [feed.next(step)[0].tolist() for step in range(5, 8)]

    assert [index for index, _ in after] == [5, 6, 7]
    assert ({pid for _, pid in after} == before) is stay
    with pytest.raises(StopIteration):
        feed.next(8)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_second_iteration_of_the_loader_changes_nothing(processes: int) -> None:
    """Another iteration of the same loader, in the middle of the first."""
    sampler = InOrder(8, 1, 8, lambda: (0, 1))
    loader = DataLoader(Traced(), batch_size=1, sampler=sampler, num_workers=processes)
    feed = feed_of(loader)
    first = [int(feed.next(step)[0][0]) for step in range(2)]
    glance = next(iter(loader))
    second = [int(feed.next(step)[0][0]) for step in range(2, 4)]
    feed.seek(Position(0, 1))
    again = [int(feed.next(step)[0][0]) for step in range(1, 4)]

    assert int(glance[0][0]) == 0
    assert (first, second, again) == ([0, 1], [2, 3], [1, 2, 3])


def test_the_step_sampler_gives_each_rank_its_own_part() -> None:
    """Ranks share one draw per step, so that which data is used depends on no membership."""

    def place(rank: int) -> tuple[int, int]:
        return rank, 2

    samplers = [StepSampler(1000, 3, 4, partial(place, r), seed=9) for r in range(2)]
    parts = [list(sampler) for sampler in samplers]
    again = list(StepSampler(1000, 3, 4, lambda: (1, 2), seed=9))

    assert parts[1] == again
    assert parts[0] != parts[1]
    assert len(parts[0]) == 12


def test_a_distributed_sampler_follows_the_rank() -> None:
    """A standby built it for another rank; at the take-over it draws for the new one."""
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    feed = feed_of(DataLoader(data, batch_size=4, sampler=sampler), place=(0, 2))
    feed.seek(Position(0, 1))

    assert feed.next(1)[0].tolist() == [8.0, 10.0, 12.0, 14.0]


def test_a_distributed_sampler_with_other_parts_is_refused() -> None:
    """As in a tensor parallel job without a declared data mesh: ranks are out of its range."""
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    feed = feed_of(DataLoader(data, batch_size=4, sampler=sampler), place=(3, 4))

    with pytest.raises(ValueError, match=r"into 2 parts, but 4 ranks .*data_mesh"):
        feed.next(0)


@pytest.mark.parametrize("make", LOADERS)
def test_a_rank_goes_back_in_its_data(make: object) -> None:
    """After a rollback the same batches come again, even those of a broken step."""
    assert callable(make)
    feed = feed_of(make())
    straight = drawn(feed, range(6))
    feed.next(6)
    feed.seek(Position(0, 2))

    assert feed.position == Position(0, 2)
    assert drawn(feed, range(2, 6)) == straight[2:]


class Counting:
    """Shuffles by the number of its iteration, and counts that itself, as Accelerate's loaders."""

    def __init__(self) -> None:
        self.iteration = 0

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.iteration)
        yield from torch.randperm(4, generator=generator)[:, None].tolist()
        self.iteration += 1


def whole(feed: Feed, count: int = 4) -> list[list[float]]:
    """All batches, to the end of the loader."""
    given = drawn(feed, range(count))
    with pytest.raises(StopIteration):
        feed.next(count)
    return given


def test_a_loader_has_the_same_epoch_after_a_break_as_for_a_worker_that_left_the_call_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The break comes before the step of a batch."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    broken, left = Counting(), Counting()
    session = Session(Voting())
    model = torch.nn.Linear(1, 1)
    session.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.batches(broken):
        break
    feed = feed_of(left)
    feed.leave()

    assert broken.iteration == left.iteration == 1


def test_a_loader_that_counts_its_iterations_has_the_epoch_of_the_call_again() -> None:
    """When it is opened a second time in a call, and after a call that a joiner has left early."""
    straight = Counting()
    epochs = [whole(feed_of(straight)) for _ in range(2)]
    loader = Counting()
    first = feed_of(loader)
    whole(first)
    first.seek(Position(0, 1))
    assert drawn(first, range(1, 4)) == epochs[0][1:]
    first.seek(Position(0, 2))
    first.leave()
    second = feed_of(loader)
    second.seek(Position(0, 3))
    assert drawn(second, range(3, 4)) == epochs[1][3:]


def divided(
    samples: int, parts: int, batch: int = 2, *, drop_last: bool = False
) -> DataLoader[object]:
    """Another order in each epoch."""
    data = TensorDataset(torch.arange(float(samples)))
    sampler = DistributedSampler(data, parts, 0, seed=4, drop_last=drop_last)
    return DataLoader(data, batch_size=batch, sampler=sampler, drop_last=drop_last)


def rest_of(feed: Feed) -> list[float]:
    found: list[float] = []
    with contextlib.suppress(StopIteration):
        while True:
            found += torch.as_tensor(feed.next(0)[0]).tolist()
    return found


@pytest.mark.parametrize(
    ("before", "after", "done", "again"),
    [
        ((2, 2), (4, 2), 6, 0),
        ((4, 2), (2, 2), 3, 0),
        ((2, 2), (3, 2), 4, 4),
        ((3, 2), (2, 2), 2, 0),
        ((2, 4), (4, 2), 3, 0),
        ((4, 2), (2, 4), 3, 0),
        ((2, 4), (4, 3), 4, 8),
        ((2, 4), (2, 2), 3, 0),
        ((2, 4), (2, 3), 4, 2),
    ],
)
def test_a_job_of_another_size_goes_on_after_as_many_samples(
    before: tuple[int, int],
    after: tuple[int, int],
    done: int,
    again: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It leaves none out. Less than a batch of each rank comes again. ``before``, ``after``: number
    of ranks, and the samples in a batch of each."""

    def feeds(parts: int, batch: int) -> list[Feed]:
        places = [partial(DataPlace, part, parts) for part in range(parts)]
        return [Feed(divided(48, parts, batch), 0, lambda: 1, place) for place in places]

    first, then = feeds(*before), feeds(*after)
    seen = [n for feed in first for batch in drawn(feed, range(done)) for n in batch]
    first[0].commit()
    for feed in then:
        feed.resume(first[0].checkpoint_position)
    count = Counter(seen + [n for feed in then for n in rest_of(feed)])

    assert len(count) == 48
    assert sum(count.values()) == 48 + again
    words = (
        f"divided into {after[0]} parts of {after[1]} samples a batch, and were into {before[0]} "
        f"of {before[1]}: the loop goes on at batch"
    )
    assert f"{words} {done * before[0] * before[1] // (after[0] * after[1])} of" in caplog.text
    assert "after as many samples" in caplog.text


def test_what_is_due_within_an_epoch_leaves_out_no_sample_behind_it() -> None:
    """An evaluation after every four batches, say: it is no end of the epoch."""
    feed = feed_of(divided(48, 2, 4), (0, 2))
    drawn(feed, range(4))
    feed.commit()
    other = feed_of(divided(48, 3, 4), (0, 3))
    other.resume(structs.replace(feed.checkpoint_position, due="evaluate"))

    assert (other.due, other.position.index) == ("evaluate", 2)  # 24 of 32 samples


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("exhausted", [False, True], ids=["in the loop", "behind it"])
@pytest.mark.parametrize(
    ("before", "after"),
    [((n, 8), (m, 8)) for n, m in ((2, 4), (4, 2), (2, 3), (3, 2), (4, 1))] + [((2, 16), (2, 8))],
)
def test_a_job_of_another_size_stays_at_the_end_of_its_epoch(
    before: tuple[int, int], after: tuple[int, int], exhausted: bool, drop_last: bool
) -> None:
    """A function is due there, after the last step, whether or not a next batch was asked for. A
    rank that is lost in it finds the same position."""

    def at_the_start(parts: int, batch: int) -> Feed:
        return feed_of(divided(60, parts, batch, drop_last=drop_last), (0, parts))

    feed, other, joiner = at_the_start(*before), at_the_start(*after), at_the_start(*after)
    rest_of(feed)
    feed.commit()
    end = structs.replace(feed.checkpoint_position, due="evaluate", exhausted=exhausted)
    other.resume(end)
    joiner.seek(other.position)

    assert (other.due, joiner.due) == ("evaluate", "evaluate")
    assert rest_of(other) == rest_of(joiner) == []


def in_a_function() -> Callable[[DataPlace], Iterable[object]]:
    """It may build any loader, such as one that counts steps."""
    return lambda _: shuffled()


def in_a_subclass() -> DataLoader[object]:
    """Others, such as shards of Accelerate with ``split_batches``, may divide each batch."""

    class Other(DataLoader[object]):
        pass

    data = dataset()
    return Other(data, batch_size=4, sampler=DistributedSampler(data, 1, 0))


@pytest.mark.parametrize("each", [sampled, iterable, in_a_function, in_a_subclass])
def test_data_whose_division_is_not_known_go_on_at_the_same_batch(
    each: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning, except for a sampler that counts steps."""
    feed, other = feed_of(each(), (0, 1)), feed_of(each(), (0, 1))
    before = drawn(feed, range(8))
    end = Position(0, 4, parts=2, batch=4)
    other.resume(end)

    assert other.position == Position(0, 4)
    assert drawn(other, range(4, 8)) == before[4:]
    assert ("samples come again or are left out" in caplog.text) == (each is not sampled)

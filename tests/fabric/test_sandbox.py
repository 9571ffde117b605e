"""A worker without a rank, whose collectives do not communicate, and taps of those that do."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fabric.circle import KEY, circle, sync
from tests.fabric.pool import pool
from tests.fabric.test_contents import as_object
from tmd.core.values.model import Member, Membership
from tmd.fabric import Fabric, Group, GroupView, Neutral
from tmd.fabric.work import Work

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def alone() -> Iterator[tuple[Fabric, Group]]:
    fabric = Fabric("standby", KEY)
    fabric.sandbox(Neutral(), 1, 3)
    yield fabric, Group(fabric, "0", range(3))
    fabric.close()


def test_group_reports_the_rank_of_the_sandbox(alone: tuple[Fabric, Group]) -> None:
    fabric, group = alone
    assert (group.rank(), group.size(), fabric.rank, fabric.membership) == (1, 3, 1, None)


def test_neutral_values_have_the_right_shape(alone: tuple[Fabric, Group]) -> None:
    _, group = alone
    own = torch.arange(4.0)
    whole = torch.zeros(12)
    parts = [torch.zeros(4) for _ in range(3)]
    group.all_gather_single(whole, own).wait()
    group.allgather([parts], [own]).wait()
    assert whole.tolist() == own.tolist() * 3
    assert [p.tolist() for p in parts] == [own.tolist()] * 3
    scattered = torch.full((4,), 9.0)
    group.reduce_scatter_single(scattered, whole).wait()
    assert scattered.tolist() == own.tolist()
    received = torch.full((4,), 9.0)
    group.recv([received], 0, 0).wait()
    assert received.tolist() == [1.0] * 4
    exchanged = torch.full((3, 2), 9.0)
    group.all_to_all_single(exchanged, torch.ones(3, 2)).wait()
    assert exchanged.tolist() == [[1.0, 1.0]] * 3
    for op in (group.allreduce, group.broadcast):
        value = torch.arange(4.0)
        assert op([value]).wait()
        assert torch.equal(value, own)


@pytest.mark.parametrize("root", [0, 1])
def test_a_script_that_asks_for_an_object_is_warned_once_for_each_line(
    root: int, alone: tuple[Fabric, Group], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody sends it. The rank that would send it has its own."""
    fabric, group = alone
    opts = dist.BroadcastOptions()
    opts.rootRank = root
    for _ in range(2):
        as_object(lambda: group.broadcast([torch.zeros(2, dtype=torch.uint8)], opts).wait())

    fabric.step.begin(keeps=False)
    as_object(lambda: group.broadcast([torch.zeros(2, dtype=torch.uint8)], opts).wait())

    assert len(caplog.messages) == (root != 1), "within a step it is in order"
    for message in caplog.messages:
        assert "asks another rank for an object, which is None here" in message
        assert f"{Path(__file__).name}:" in message


def test_vote_and_shift_return_their_input(alone: tuple[Fabric, Group]) -> None:
    fabric, _ = alone
    assert fabric.reduce_min([3, -1]) == (3, -1)
    assert fabric.shift(b"state", 1) == b"state"


def test_future_carries_the_tensors(alone: tuple[Fabric, Group]) -> None:
    _, group = alone
    tensor = torch.ones(2)
    assert group.allreduce([tensor]).get_future().wait()[0] is tensor


class Recorder:
    """A tap that keeps everything."""

    def __init__(self) -> None:
        self.tape: list[tuple[str, str, list[Tensor]]] = []
        self.put_in: list[tuple[str, str, list[Tensor]]] = []
        self.observed: list[object] = []

    @property
    def follows(self) -> bool:
        return True

    def given(self, op: str, group: str, inputs: Sequence[Tensor]) -> str:
        self.put_in.append((op, group, [t.clone() for t in inputs]))
        return str(len(self.put_in))

    def output(self, op: str, group: str, outputs: Sequence[Tensor], given: str = "") -> None:
        self.tape.append((op, group, [t.clone() for t in outputs]))

    def voted(self, result: Sequence[int]) -> None:
        self.observed.append(tuple(result))

    def shifted(self, offset: int, payload: bytes) -> None:
        self.observed.append((offset, payload))


class Recorded(Neutral):
    """Plays back what a tap recorded."""

    def __init__(self, tape: list[tuple[str, str, list[Tensor]]]) -> None:
        self.tape = tape

    def outputs(
        self, op: str, group: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        if op == "send":
            return
        recorded_op, recorded_group, values = self.tape.pop(0)
        assert (recorded_op, recorded_group) == (op, group)
        for out, value in zip(outputs, values, strict=True):
            out.copy_(value)


class Channels(Neutral):
    """Plays back each channel in its own order."""

    def __init__(self, tape: list[tuple[str, str, list[Tensor]]]) -> None:
        self._queues: dict[str, list[list[Tensor]]] = {}
        for _, channel, values in tape:
            self._queues.setdefault(channel, []).append(values)

    def outputs(
        self, op: str, group: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        for out, value in zip(outputs, self._queues[group].pop(0), strict=True):
            out.copy_(value)


def program(group: Group) -> list[Tensor]:
    """One operation of each kind. What is scattered and received differs between ranks."""
    own = torch.arange(1.0, 4.0) * (group.rank() + 1)
    total, whole, piece = own.clone(), torch.zeros(9), torch.zeros(1)
    group.allreduce([total], sync()).wait()
    group.all_gather_single(whole, own).wait()
    group.reduce_scatter_single(piece, own.clone(), dist.ReduceScatterOptions()).wait()
    message = torch.zeros(3)
    work = group.recv([message], (group.rank() - 1) % 3, 7)
    group.send([own], (group.rank() + 1) % 3, 7).wait()
    work.wait()
    return [total, whole, piece, message]


def test_a_recording_of_the_tap_replays_in_the_sandbox() -> None:
    with circle(3) as c:
        c.group()
        recorder = Recorder()
        c.fabrics[1].tap = recorder
        tape = recorder.tape
        live = c.each(lambda f: program(c.of(f)))[1]
        assert [op for op, _, _ in tape] == ["allreduce", "allgather", "reduce_scatter", "recv"]
        # A rank's input is recorded before it is overwritten in place.
        op, _, (own,) = recorder.put_in[0]
        assert (op, own.tolist()) == ("allreduce", [2.0, 4.0, 6.0])
        standby = c.standby("standby")
        standby.sandbox(Recorded(tape), 1, 3)
        shadow = program(c.of(standby))
        assert all(torch.equal(a, b) for a, b in zip(live, shadow, strict=True))
        assert tape == []


def post_receives(group: Group, *wanted: tuple[int, int]) -> tuple[list[Tensor], list[Work]]:
    """Receives from (sender, tag), posted in this order."""
    into = [torch.zeros(2) for _ in wanted]
    works = [group.recv([t], *where) for t, where in zip(into, wanted, strict=True)]
    return into, works


def test_messages_are_replayed_by_sender_and_tag_whatever_their_order_of_arrival() -> None:
    """The first receive is posted first, and its message arrives fourth."""
    wanted = [(0, 5), (2, 5), (0, 6), (0, 5), (2, 5)]
    with circle(3) as c:
        c.group()
        recorder = Recorder()
        receiver = c.fabrics[1]
        receiver.tap = recorder
        live, works = post_receives(c.of(receiver), *wanted)
        assert not receiver.quiet
        assert not receiver.waiting
        for value, place in enumerate((4, 1, 2, 0, 3)):
            # Each after the previous one has arrived.
            source, tag = wanted[place]
            c.of(c.fabrics[source]).send([torch.full((2,), float(value))], 1, tag)
            next(
                w
                for w, its in zip(works, wanted, strict=True)
                if its == (source, tag) and not w.is_completed()
            ).wait()
        assert receiver.quiet
        assert [g for _, g, _ in recorder.tape] == ["0/2/5", "0/2/5", "0/0/6", "0/0/5", "0/0/5"]
        standby = c.standby("standby")
        standby.sandbox(Channels(recorder.tape), 1, 3)
        shadow, works = post_receives(c.of(standby), *wanted)
        assert all(work.wait() for work in works)
        assert all(torch.equal(a, b) for a, b in zip(live, shadow, strict=True))


def test_a_receive_whose_message_cannot_be_mirrored_ends_with_the_error() -> None:
    """Such as one for which there is no memory. Nobody waits for it any longer."""

    class Full(Recorder):
        def output(self, *args: object, **rest: object) -> None:
            raise MemoryError("no memory for the copy of a shadow")

    with circle(2) as c:
        c.group()
        c.fabrics[1].tap = Full()
        work = c.of(c.fabrics[1]).recv([torch.zeros(2)], 0)
        c.of(c.fabrics[0]).send([torch.ones(2)], 1).wait()
        with pytest.raises(MemoryError, match="copy of a shadow"):
            work.wait()
        assert "failed in recv" in c.fabrics[1].poison_reason
        assert c.fabrics[1].quiet


def test_a_receive_from_any_source_is_distinguished() -> None:
    """A shadow could not tell for which of its receives a message was."""
    with circle(2) as c:
        c.group()
        recorder = Recorder()
        c.fabrics[1].tap = recorder
        work = c.of(c.fabrics[1]).recv_anysource([torch.zeros(2)])
        c.of(c.fabrics[0]).send([torch.ones(2)], 1).wait()
        work.wait()
        assert [op for op, _, _ in recorder.tape] == ["recv_anysource"]


def test_the_tap_sees_the_outcome_of_votes_and_shifts() -> None:
    with circle(3) as c:
        recorder = Recorder()
        c.fabrics[1].tap = recorder
        c.each(lambda f: f.reduce_min([f.rank or 0, 7]))
        c.each(lambda f: f.shift(bytes([f.rank or 0]), 1))
        assert recorder.observed == [(0, 7), (1, b"\x00")]


# --- the bare call of dist.init_process_group, in processes of their own ------------------------


def bare_in_the_sandbox(rank: int, size: int, store: dist.Store) -> list[object]:
    import os

    from tmd.fabric import install

    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    fabric = Fabric("standby", KEY)
    fabric.sandbox(Neutral(), 2, 4)
    install(fabric)
    dist.init_process_group("tmd")
    subgroup = dist.new_group([2, 3])
    others = dist.new_group([0, 1])
    dist.new_group([2, 3], backend="fake")  # as torchtitan does
    for backend in ("gloo", "cpu:gloo,cuda:tmd"):
        with pytest.raises(
            ValueError, match=f"backend='{backend}' cannot reach .* leave 'backend'"
        ):
            dist.new_group([2, 3], backend=backend)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    seen = [None] * 4
    dist.all_gather_object(seen, "me")
    facts = [dist.get_rank(), dist.get_world_size(), dist.get_rank(subgroup), seen]
    facts += [others == dist.GroupMember.NON_GROUP_MEMBER, fabric.groups()]
    dist.destroy_process_group()
    fabric.close()
    return facts


def test_bare_init_in_the_sandbox(tmp_path: Path) -> None:
    with pool(1, str(tmp_path / "store")) as p:
        (facts,) = p.run(bare_in_the_sandbox)
    views = (GroupView("0", (0, 1, 2, 3)), GroupView("1", (2, 3)))
    assert facts == [2, 4, 0, ["me"] * 4, True, views]


def rows_in_the_sandbox(rank: int, size: int, store: dist.Store, worn: int) -> list[str]:
    """Errors in what the table's rows return without peers."""
    from tests.fabric.entries import ROWS, At, Variant
    from tests.fabric.functional_entries import FUNCTIONAL
    from tmd.fabric import install

    fabric = Fabric("standby", KEY)
    fabric.sandbox(Neutral(), worn, 5)
    install(fabric)
    dist.init_process_group("tmd")
    variants = [Variant(), Variant(later=True), Variant(strided=True), Variant(shape=(0, 2))]
    variants += [Variant(dtype=dtype) for dtype in (torch.int64, torch.uint8, torch.complex64)]
    variants.append(Variant(shape=(6,)))
    wrong = []
    world = dist.group.WORLD
    assert world is not None
    for row in (*ROWS, *FUNCTIONAL):
        for variant in filter(row.fits, variants):
            try:
                pairs = row.run(At(variant, world, worn))
            except Exception as error:
                wrong.append(f"{row}, {variant}: {error!r}")
                continue
            wrong += [f"{row}, {variant}: {a}, not like {b}" for a, b in pairs if not alike(a, b)]
    dist.destroy_process_group()
    fabric.close()
    return wrong


def alike(got: object, wanted: object) -> bool:
    """Of the same shape and type. Objects are not compared: those of other ranks are ``None``."""
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        return (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if isinstance(got, list) and isinstance(wanted, list):
        kinds = (dict, int, type(None))
        return len(got) == len(wanted) and all(isinstance(each, kinds) for each in got)
    return type(got) is type(wanted)


@pytest.mark.parametrize("worn", [0, 2, 4], ids=["first", "inner", "last"])
def test_every_entry_completes_in_the_sandbox(tmp_path: Path, worn: int) -> None:
    """A standby runs the whole script before it holds a rank, whatever collectives it calls."""
    with pool(1, str(tmp_path / "store")) as p:
        (wrong,) = p.run(rows_in_the_sandbox, worn)

    assert not wrong, "\n".join(wrong[:9])


def entered(rank: int, size: int, store: dist.Store) -> Fabric:
    """Join the default group of ``size`` processes with ``rank``."""
    from tmd.fabric import install

    fabric = Fabric(f"w{rank}", KEY)
    store.set(f"address/{rank}", fabric.address)
    members = [Member(f"w{r}", "here", store.get(f"address/{r}").decode()) for r in range(size)]
    fabric.enter(Membership(epoch=3, members=tuple(members)), rank)
    install(fabric)
    dist.init_process_group("tmd")
    return fabric


def bare_with_a_rank(rank: int, size: int, store: dist.Store) -> float:
    fabric = entered(rank, size, store)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    fabric.close()
    return tensor.item()


def test_bare_init_with_a_rank(tmp_path: Path) -> None:
    with pool(2, str(tmp_path / "store")) as p:
        assert p.run(bare_with_a_rank) == [1.0, 1.0]


def objects_in_a_poisoned_epoch(rank: int, size: int, store: dist.Store) -> list[object]:
    fabric = entered(rank, size, store)
    dist.barrier()
    fabric.poison("a rank was lost")
    sent, part, gathered, received = ["mine"], [0], ["", ""], [0]
    dist.broadcast_object_list(sent, 1)
    dist.scatter_object_list(part, ["a", "b"] if rank == 1 else None, 1)
    dist.all_gather_object(gathered, "mine")
    if rank == 0:
        dist.recv_object_list(received, 1)
    dist.destroy_process_group()
    fabric.close()
    return [sent, part, gathered, received]


def test_objects_in_a_poisoned_epoch_are_python_none(tmp_path: Path) -> None:
    """Not a pickle of arbitrary memory: a survivor computes the step to its end."""
    with pool(2, str(tmp_path / "store")) as p:
        first, _ = p.run(objects_in_a_poisoned_epoch)

    assert first == [[None], [None], [None, None], [None]]


def test_what_a_step_calls_is_counted_when_it_is_called(alone: tuple[Fabric, Group]) -> None:
    """Collectives and messages, before they run; not what a thread of a library calls. All
    collectives count as run, those of the library, too."""
    fabric, group = alone
    fabric.calls.stepping = threading.current_thread()
    released = threading.Event()

    def hold() -> None:
        released.wait(20)

    group._runner.lane.run(hold, inline=False)
    works = [group.allreduce([torch.ones(1)]), group.send([torch.ones(1)], 0, 0)]
    assert (fabric.calls.begun, fabric.calls.ran) == (2, 0)
    released.set()
    assert all(work.wait() for work in works)

    library = threading.Thread(target=lambda: group.allreduce([torch.ones(1)]).wait())
    library.start()
    library.join()
    assert (fabric.calls.begun, fabric.calls.ran) == (2, 2)

"""A step whose reductions may depend on each other cannot be computed in passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tests.fabric.circle import circle, sync
from tmd.fabric import Group
from tmd.fabric.dependent_sums import TWICE, WAITED

pytestmark = pytest.mark.timeout(60)
Bucket = dist.GradBucket
Hook = Callable[[Group, Bucket], Future[torch.Tensor]]


@pytest.fixture
def group() -> Iterator[Group]:
    """Of a worker that could adopt ranks. In the sandbox no operation waits for another rank."""
    with circle(2) as jobs:
        jobs.group()
        joiner = jobs.standby("joiner")
        watch(jobs.of(joiner))
        yield jobs.of(joiner)


def watch(group: Group) -> None:
    """The script registers its state, and a step begins."""
    group._fabric.passes.request_elastic("")
    group._fabric.passes.open_step()


def obstacle(group: Group) -> str | None:
    return group._fabric.passes.inelastic


def at_once(group: Group, tensor: torch.Tensor) -> None:
    group.allreduce([tensor], sync()).wait()


def by_work(group: Group, tensor: torch.Tensor) -> None:
    group.allreduce([tensor]).wait()


def by_future(group: Group, tensor: torch.Tensor) -> None:
    future = group.allreduce([tensor]).get_future()
    future.wait()


@pytest.mark.parametrize("wait", [at_once, by_work, by_future])
def test_a_sum_after_one_that_was_waited_for_is_refused(
    group: Group, wait: Callable[[Group, torch.Tensor], None]
) -> None:
    tokens = torch.ones(1)
    wait(group, tokens)
    before = obstacle(group)
    group.allreduce([torch.ones(3) / tokens])

    assert before == ""
    assert obstacle(group) == WAITED


def test_sums_that_are_waited_for_at_the_end_are_not(group: Group) -> None:
    works = [group.allreduce([torch.ones(n)]) for n in (3, 4)]
    for work in works:
        work.wait()
    group.barrier().wait()

    assert obstacle(group) == ""


def test_parts_of_one_tensor_may_be_summed(group: Group) -> None:
    whole = torch.ones(4)
    for part in whole.chunk(2):
        group.allreduce([part])

    assert obstacle(group) == ""


def test_memory_that_is_used_again_is_no_tensor_that_is_summed_twice(group: Group) -> None:
    """A hook that compresses gradients frees what it has summed."""
    addresses = set()
    for _ in range(20):
        tensor = torch.ones(300)
        addresses.add(tensor.data_ptr())
        work = group.allreduce([tensor])
        group._fabric.drain()
        del tensor, work

    assert len(addresses) < 20
    assert obstacle(group) == ""


def test_the_sums_of_the_next_step_do_not_depend_on_those_of_this_one(group: Group) -> None:
    """The last pass had the right values, and all passes of the next step begin with these."""
    tensor = torch.ones(3)
    for _ in range(2):
        group._fabric.passes.open_step()
        by_work(group, tensor)

    assert obstacle(group) == ""


def wide(group: Group) -> DistributedDataParallel:
    """A model with several buckets."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.02)
    watch(group)
    return model


def backward(model: DistributedDataParallel) -> None:
    model(torch.ones(1, 64)).sum().backward()


def test_a_backward_pass_of_ddp_sums_its_buckets_independently(group: Group) -> None:
    """Also over several steps, and behind passes that sum nothing."""
    model = wide(group)
    for _ in range(3):
        group._fabric.passes.open_step()
        with model.no_sync():
            backward(model)
        before = group._fabric.calls.begun
        backward(model)
        buckets = group._fabric.calls.begun - before

    assert buckets > 1
    assert obstacle(group) == ""


def test_two_models_may_be_trained_in_a_step(group: Group) -> None:
    models = wide(group), wide(group)
    for model in models:
        backward(model)

    assert obstacle(group) == ""


def test_the_map_of_used_parameters_is_no_result_that_a_script_uses(group: Group) -> None:
    """DDP waits for it at the end of a backward pass, and then the script sums its loss."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    model = DistributedDataParallel(layers, process_group=group, find_unused_parameters=True)
    watch(group)
    for _ in range(2):
        group._fabric.passes.open_step()
        backward(model)
        group.allreduce([torch.ones(1)]).wait()

    assert obstacle(group) == ""


def test_a_sum_of_an_earlier_step_may_be_waited_for(group: Group) -> None:
    """As a script does that logs with a delay."""
    work = group.allreduce([torch.ones(1)])
    group._fabric.passes.open_step()
    work.wait()
    group.allreduce([torch.ones(3)])

    assert obstacle(group) == ""


def test_a_second_backward_pass_adds_to_the_sum_of_the_first(group: Group) -> None:
    model = wide(group)
    backward(model)  # DDP builds other buckets after its first step
    group._fabric.passes.open_step()
    backward(model)
    before = obstacle(group)
    backward(model)

    assert before == ""
    assert obstacle(group) == TWICE


def rescaling(group: Group, bucket: Bucket) -> Future[torch.Tensor]:
    future: Future[list[torch.Tensor]] = group.allreduce([bucket.buffer()]).get_future()
    return future.then(lambda done: done.value()[0] / 2)


def chained(group: Group, bucket: Bucket) -> Future[torch.Tensor]:
    """As PowerSGD's: what is summed second follows from the first sum."""
    future: Future[list[torch.Tensor]] = group.allreduce([bucket.buffer()]).get_future()

    def sum_again(done: Future[list[torch.Tensor]]) -> torch.Tensor:
        scale = done.value()[0].norm()[None]
        group.allreduce([scale]).wait()
        return done.value()[0] * scale

    return future.then(sum_again)


@pytest.mark.parametrize(
    ("hook", "why"),
    [(rescaling, ""), (default_hooks.fp16_compress_hook, ""), (chained, WAITED)],
)
def test_a_communication_hook_may_rescale_sums(group: Group, hook: Hook, why: str) -> None:
    if hook.__module__ == __name__:  # torch compares the types themselves
        hook.__annotations__.update({"bucket": Bucket, "return": Future[torch.Tensor]})
    model = wide(group)
    model.register_comm_hook(group, hook)
    backward(model)

    assert obstacle(group) == why

"""torch's parallel layouts give Gloo's results, and the same bits when repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fabric.pool import Pool, pool

pytestmark = pytest.mark.timeout(120)

WORLD = 4
STEPS = 5
WIDTH = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def batch(step: int, place: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + place))


def full(tensor: Tensor) -> Tensor:
    """A plain copy, gathered if it is distributed."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def train(model: nn.Module, place: int) -> list[Tensor]:
    """Losses and final weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = batch(step, place)
        optimizer.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(full(loss))
    return [*losses, *(full(p) for p in model.parameters())]


def ddp(rank: int) -> list[Tensor]:
    return train(nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.01), rank)


def compiled_ddp(rank: int) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(Net())
    # Inductor is slow, and the choice of backend does not matter here.
    compiled: Any = torch.compile(model, backend="eager")
    return train(compiled, rank)


def fsdp(rank: int) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (WORLD,))
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return train(model, rank)


def hsdp(rank: int) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return train(model, rank)


def tensor_parallel(rank: int) -> list[Tensor]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Net(), mesh["model"], plan)
    return train(model, rank // 2)


def pipeline(rank: int) -> list[Tensor]:
    """Two pipelines of two stages, connected by send and recv."""
    stage, peer = rank % 2, rank ^ 1
    torch.manual_seed(stage)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, rank // 2)
        if stage == 0:
            out = model(x)
            dist.send(out.detach(), peer)
            grad = torch.empty_like(out)
            dist.recv(grad, peer)
            out.backward(grad)
        else:
            hidden = torch.empty(8, WIDTH)
            dist.recv(hidden, peer)
            hidden.requires_grad_()
            (model(hidden) - x).pow(2).mean().backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, peer)
        optimizer.step()
    return [full(p) for p in model.parameters()]


def scheduled_pipeline(rank: int) -> list[Tensor]:
    """torch's own pipeline schedule over all four ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(rank)
    module = nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(module, rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step, 0)
        args: tuple[Any, ...] = (x,) if rank == 0 else ()
        more: dict[str, Any] = {"target": x} if rank == WORLD - 1 else {}
        schedule.step(*args, **more)
        optimizer.step()
    return [full(p) for p in module.parameters()]


LAYOUTS: dict[str, Callable[[int], list[Tensor]]] = {
    f.__name__: f
    for f in (ddp, compiled_ddp, fsdp, hsdp, tensor_parallel, pipeline, scheduled_pipeline)
}


def run(
    rank: int, size: int, store: dist.Store, backend: str, turn: str, layout: str
) -> list[Tensor]:
    import tmd.fabric  # noqa: F401 - registers the backend

    own = dist.PrefixStore(f"{backend}/{turn}/{layout}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    try:
        return LAYOUTS[layout](rank)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(WORLD, str(tmp_path_factory.mktemp("layouts") / "store")) as made:
        yield made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_gloo_and_repeats_bit_for_bit(workers: Pool, layout: str) -> None:
    gloo = workers.run(run, "gloo", "first", layout)
    first = workers.run(run, "tmd", "first", layout)
    second = workers.run(run, "tmd", "second", layout)
    for rank in range(WORLD):
        for ours, again, theirs in zip(first[rank], second[rank], gloo[rank], strict=True):
            assert torch.equal(ours, again), "two runs differ"
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

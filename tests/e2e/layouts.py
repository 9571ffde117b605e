"""A training script in one of several layouts of four ranks, with groups of some of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

import tmd.trainer
from tmd.campaign.points import Injector
from tmd.trainer import replicas_along
from tmd.trainer.state.digests import digest_of

WIDTH, CLASSES, BATCH = 32, 8, 8
injector = Injector()


class Net(nn.Module):
    """Two layers, which all layouts can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wide(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: injector.reach("backward"))
        return self.head(hidden)


class Layout(NamedTuple):
    """A model that is distributed over ranks, and its declarations to the session."""

    model: nn.Module
    registered: dict[str, Any] = {}
    reduce: Callable[[], None] = lambda: None
    """After the backward pass: sum the gradients that the model does not sum."""
    sampler: Callable[[TensorDataset], Sampler[int]] | None = None
    """If left out, the session's."""


def compiled(net: Net, backend: str = "aot_eager") -> Layout:
    """DDP around a compiled model. No compiler sees through a hook, so it is outside."""

    def follow(_: nn.Module, __: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: injector.reach("backward"))

    layers = nn.Sequential(net.wide, nn.ReLU(), net.head)
    model = DistributedDataParallel(torch.compile(layers, backend=backend))
    model.register_forward_hook(follow)
    return Layout(model)


def inductor(net: Net) -> Layout:
    """As ``compiled``, with the code that users get: every process generates it."""
    return compiled(net, "inductor")


def hybrid(net: Net) -> Layout:
    """HSDP: shards over pairs, each pair a replica of the other; computes in bfloat16, and the
    activations of one layer a second time."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    checkpoint(net.wide)
    for module in (net.wide, net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return Layout(net)


def tensor(net: Net) -> Layout:
    """Tensor parallel in pairs that see the same batch, times data parallel by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"wide": ColwiseParallel(), "head": RowwiseParallel()})
    group = mesh["dp"].get_group()

    def reduce() -> None:
        for grad in local(p.grad for p in net.parameters()):
            dist.all_reduce(grad, group=group)
            grad /= 2

    def sampler(data: TensorDataset) -> Sampler[int]:
        return DistributedSampler(data, 2, mesh["dp"].get_local_rank(), shuffle=False)

    registered = {"replicas": replicas_along(mesh, "dp"), "data_mesh": mesh["dp"]}
    return Layout(net, registered, reduce, sampler)


def both(net: Net) -> Layout:
    """Tensor parallel in pairs, sharded over the other dimension: each state is unique."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"wide": ColwiseParallel(), "head": RowwiseParallel()})
    for module in (net.wide, net):
        fully_shard(module, mesh=mesh["dp"])
    return Layout(net, {"data_mesh": mesh["dp"]})


class Experts(nn.Module):
    """Two experts on two ranks; each sample goes to the one that the router prefers."""

    def __init__(self, net: Net, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.expert = net
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(dim=1)
        chosen = weights.argmax(dim=1)
        order = chosen.argsort(stable=True)
        given = torch.bincount(chosen, minlength=2)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self._group)
        sizes = given.tolist(), taken.tolist()
        there = all_to_all_single_autograd(x[order], sizes[1], sizes[0], self._group)
        back = all_to_all_single_autograd(self.expert(there), sizes[0], sizes[1], self._group)
        return back[order.argsort()] * weights.gather(1, chosen[:, None])


def experts(net: Net) -> Layout:
    """Expert parallel in pairs, times data parallel by hand; how many samples go where differs from
    step to step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(mesh.get_local_rank("ep"))
    model = Experts(Net(), mesh["ep"].get_group())
    everywhere = set(model.router.parameters())

    def reduce() -> None:
        for param in model.parameters():
            if param.grad is not None:
                alike = param in everywhere
                dist.all_reduce(param.grad, group=None if alike else mesh["dp"].get_group())
                param.grad /= 4 if alike else 2

    torch.manual_seed(0)
    nn.init.normal_(model.router.weight)
    nn.init.zeros_(model.router.bias)
    return Layout(model, {"replicas": replicas_along(mesh, "dp")}, reduce)


LAYOUTS: dict[str, Callable[[Net], Layout]] = {
    each.__name__: each for each in (compiled, inductor, hybrid, tensor, both, experts)
}


def local(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """This rank's part of each tensor."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]


def place(mesh: DeviceMesh | None) -> str:
    """Part of the digest: a wrong place in the mesh would go unnoticed otherwise."""
    return "" if mesh is None else str(mesh.get_coordinate())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=sorted(LAYOUTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes more")
    parser.add_argument("--seekable", action="store_true", help="batches that nobody walks to")
    parser.add_argument("--checkpoints", default="", help="a folder: one every twenty steps")
    parser.add_argument("--cut", type=int, default=-1, help="end before this step")
    args = parser.parse_args()
    torch.manual_seed(0)
    session = tmd.trainer.join()
    injector.follow(session)
    dist.init_process_group("tmd")
    draw = torch.Generator().manual_seed(1)
    size = args.steps * BATCH * 2
    data = TensorDataset(
        torch.randn(size, 16, generator=draw), torch.randint(CLASSES, (size,), generator=draw)
    )
    layout = LAYOUTS[args.layout](Net())
    optimizer = torch.optim.AdamW(layout.model.parameters(), lr=1e-2)
    session.register(model=layout.model, optimizer=optimizer, **layout.registered)
    own: Sampler[int] = session.sampler(size, BATCH, args.steps)
    if layout.sampler is not None and not args.seekable:
        own = layout.sampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=own)

    if args.checkpoints:
        session.checkpoint(args.checkpoints, every=20)
    for inputs, targets in session.batches(loader):
        if session.step_number == args.cut:
            break
        with session.step() as step:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(layout.model(inputs), targets)
            time.sleep(args.pace)
            loss.backward()
            layout.reduce()
            optimizer.step()
            step.record(loss)
        injector.reach("between")
    folder = os.environ.get("TMD_TRACE")
    if folder and not session.shadowing:
        digest = digest_of(local(layout.model.parameters()))
        where = place(layout.registered.get("data_mesh"))
        Path(folder, f"weights-{session.rank}").write_text(f"{digest} {where}")


if __name__ == "__main__":
    sys.exit(main())

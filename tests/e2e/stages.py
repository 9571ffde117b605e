"""Jobs whose ranks have different roles, through ``session.build``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from layouts import BATCH, CLASSES, WIDTH, local  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import tmd.trainer
from tmd.campaign.points import Injector
from tmd.trainer import Session, replicas_along
from tmd.trainer.state.digests import digest_of

MICROBATCHES = 4
injector = Injector()
Train = Callable[[Tensor, Tensor], Tensor]


class Part(NamedTuple):
    """A rank's objects for the loop."""

    module: nn.Module
    optimizer: Optimizer
    train: Train
    """Forward and backward; returns the loss, or a substitute on a rank without one."""


def watched(hidden: Tensor) -> Tensor:
    """Lets faults strike in the middle of its backward pass."""
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: injector.reach("backward"))
    return hidden


class Layer(nn.Linear):
    """The only kind of layer here."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(watched(super().forward(input)))


def unlike(session: Session, mesh: DeviceMesh) -> Part:
    """Two models, a shallow and a deep one, that are trained side by side, each with DDP."""
    deep = mesh.get_local_rank("kind")
    torch.manual_seed(deep)
    layers = [Layer(WIDTH, WIDTH) for _ in range(2 * deep)]
    net = nn.Sequential(Layer(16, WIDTH), *layers, Layer(WIDTH, CLASSES))
    model = DistributedDataParallel(net, process_group=mesh["dp"].get_group(), bucket_cap_mb=0.002)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    replicas = replicas_along(mesh, "dp")
    session.register(model=model, optimizer=optimizer, replicas=replicas, data_mesh=mesh["dp"])

    def train(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    return Part(net, optimizer, train)


def part_of(mesh: DeviceMesh) -> nn.Sequential:
    """The stage of this rank; with a third dimension it is divided by tensor parallelism."""
    number = mesh.get_local_rank("pp")
    first, last = number == 0, number == mesh["pp"].size() - 1
    torch.manual_seed(number)
    module = nn.Sequential(Layer(16 if first else WIDTH, CLASSES if last else WIDTH))
    if "tp" in (mesh.mesh_dim_names or ()):
        module.insert(0, Layer(16, 16) if first else Layer(WIDTH, WIDTH))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return module


def pipeline(session: Session, mesh: DeviceMesh) -> Part:
    """Stages of one model, by turns forward and backward, times data parallel by hand."""
    number, last = mesh.get_local_rank("pp"), mesh["pp"].size() - 1
    module = part_of(mesh)
    rows = BATCH // MICROBATCHES
    stage = PipelineStage(
        module,
        number,
        last + 1,
        torch.device("cpu"),
        # Declared in advance: a standby has no peer to ask.
        input_args=torch.empty(rows, 16 if number == 0 else WIDTH, requires_grad=number > 0),
        output_args=torch.empty(rows, CLASSES if number == last else WIDTH, requires_grad=True),
        group=mesh["pp"].get_group(),
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, cross_entropy)
    optimizer = AdamW(module.parameters(), lr=1e-2)
    replicas = replicas_along(mesh, "dp")
    session.register(model=module, optimizer=optimizer, replicas=replicas, data_mesh=mesh["dp"])

    def train(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        grads = local(p.grad for p in module.parameters())
        for grad in grads:
            dist.all_reduce(grad, group=mesh["dp"].get_group())
            grad /= mesh["dp"].size()
        return torch.stack(losses or [grad.norm() for grad in grads]).mean()

    return Part(module, optimizer, train)


class Untold(NamedTuple):
    """A session without declared replicas: each state counts as unique."""

    session: Session

    def register(self, *, replicas: object, **told: Any) -> None:
        self.session.register(**told)


def single(session: Session, mesh: DeviceMesh) -> Part:
    """The same, without replicas."""
    return pipeline(cast(Session, Untold(session)), mesh)


def zero(session: Session, mesh: DeviceMesh, *, averaged: bool = False) -> Part:
    """One model for all, whose optimizer state is divided over the last dimension. ``averaged``:
    there is also a copy of the weights, and the weights are views of the broadcast buckets."""
    # Only here, since the other jobs need not import it.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    net = nn.Sequential(Layer(16, WIDTH), Layer(WIDTH, WIDTH), Layer(WIDTH, CLASSES))
    model = DistributedDataParallel(net)
    # In a group with so few parameters some ranks have none.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() == 1]},
    ]
    group = mesh.get_group(mesh.ndim - 1)
    how: dict[str, Any] = {"parameters_as_bucket_view": averaged, "process_group": group}
    optimizer = ZeroRedundancyOptimizer(groups, AdamW, lr=1e-2, **how)
    scheduler = StepLR(optimizer, step_size=7, gamma=0.9)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    models: list[nn.Module] = [model]
    if averaged:
        average = AveragedModel(net)
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(net))
        models.append(average)
    replicas = replicas_along(mesh, "dp") if mesh.ndim > 1 else None
    session.register(model=models, optimizer=optimizer, scheduler=scheduler, replicas=replicas)

    def train(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    return Part(nn.ModuleList(models), optimizer, train)


def averaged(session: Session, mesh: DeviceMesh) -> Part:
    """The same, with more of it."""
    return zero(session, mesh, averaged=True)


class Job(NamedTuple):
    """The layout of ranks, and the build of each. ``again``: the function for the session."""

    dims: dict[str, int]
    build: Callable[[Session, DeviceMesh], Part]
    again: bool = True


JOBS = {
    "unlike": Job({"dp": 2, "kind": 2}, unlike),
    "pipeline": Job({"dp": 2, "pp": 2}, pipeline),
    "single": Job({"dp": 2, "pp": 2}, single),
    "deep": Job({"dp": 1, "pp": 4}, pipeline),
    "zero": Job({"zero": 4}, zero),
    "averaged": Job({"zero": 4}, averaged),
    "pairs": Job({"dp": 2, "zero": 2}, zero),
    "once": Job({"zero": 4}, zero, again=False),
    "eight": Job({"dp": 2, "pp": 2, "tp": 2}, pipeline),
}


def paced(train: Train, seconds: float) -> Train:
    """Take as long as a slower device would."""

    def slowly(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = train(inputs, targets)
        time.sleep(seconds)
        return loss

    return slowly


def train(session: Session, inputs: Tensor, targets: Tensor) -> None:
    """One step. A name in the loop would keep its object alive beside the rebuilt ones."""
    part: Part = session.built
    with session.step() as step:
        part.optimizer.zero_grad()
        loss = part.train(inputs, targets)
        step.record(loss)
        part.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes more")
    parser.add_argument("--checkpoints", default="", help="a folder: one every twenty steps")
    parser.add_argument("--cut", type=int, default=-1, help="end before this step")
    args = parser.parse_args()
    session = tmd.trainer.join()
    injector.follow(session)
    dist.init_process_group("tmd")
    job = JOBS[args.job]
    mesh = init_device_mesh("cpu", tuple(job.dims.values()), mesh_dim_names=tuple(job.dims.keys()))
    draw = torch.Generator().manual_seed(1)
    size = args.steps * BATCH * 2
    data = TensorDataset(
        torch.randn(size, 16, generator=draw), torch.randint(CLASSES, (size,), generator=draw)
    )
    sampler = session.sampler(size, BATCH, args.steps)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    def build(session: Session) -> Part:
        print(f"built as rank {session.rank}", flush=True)
        part = job.build(session, mesh)
        return part._replace(train=paced(part.train, args.pace)) if args.pace else part

    if job.again:
        session.build(build)
    else:
        session.built = build(session)
    if not session.shadowing:
        injector.reach("start")
    if args.checkpoints:
        session.checkpoint(args.checkpoints, every=20)

    for inputs, targets in session.batches(loader):
        if session.step_number == args.cut:
            break
        train(session, inputs, targets)
        injector.reach("between")
    folder = os.environ.get("TMD_TRACE")
    if folder and not session.shadowing:
        digest = digest_of(local(session.built.module.parameters()))
        where = f"{digest} {mesh.get_coordinate()}"
        Path(folder, f"weights-{session.rank}").write_text(where)


if __name__ == "__main__":
    sys.exit(main())

"""The collectives of a process group: turns torch's calls into calls of the runner.

It has the old and new method names of torch 2.11 to 2.13. Errors that can be detected without the
other ranks raise ValueError at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmd.fabric import coalescing
from tmd.fabric.collectives import on_tensors
from tmd.fabric.collectives.allreduce import Allreduce
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.frame import FrameKind
from tmd.fabric.identity import Identity
from tmd.fabric.kept_calls import CollectiveCall
from tmd.fabric.objects import empty, under_way, warn_of_none
from tmd.fabric.reduction import Reduction, dtype_code, reduction
from tmd.fabric.sandbox import Neutral
from tmd.fabric.untraced import untraced
from tmd.fabric.work import Work

_UNSENT = frozenset({FrameKind.BROADCAST, FrameKind.SCATTER})
"""Only a root provides the input: parts of an object may have no sender."""
_APART = frozenset({FrameKind.ALLGATHER, FrameKind.GATHER, FrameKind.SCATTER})
"""Operations that do not work in place: even the root's outputs are uninitialised."""
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
TensorList = list[Tensor]
Nested = list[list[Tensor]]


class CollectiveGroup(Identity):
    """All operations in which every rank of the group takes part.

    None calls another public collective: a subclass may pass that one on, in another form.
    """

    def _submit(
        self,
        kind: FrameKind,
        body: Body,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
        *,
        root: int = 0,
        detail: int = 0,
    ) -> Work:
        if not 0 <= root < self.size():
            raise ValueError(f"root {root} is not a rank of a group of {self.size()}")
        _check_dense(kind, (*outputs, *inputs))
        dtype = self._type_code(kind, (*outputs, *inputs))
        unsent = kind in _UNSENT and self.rank() != root
        emptied = (unsent or kind in _APART) and under_way()
        if emptied:
            empty(outputs)
        objects = emptied and unsent
        sandbox = self._fabric.sandboxed
        alone = sandbox is not None and isinstance(sandbox.source, Neutral)
        if objects and alone and not self._fabric.step.has_begun:
            warn_of_none()
        call = CollectiveCall(kind, body, outputs, inputs, dtype, root, detail, objects, emptied)
        return self._begun(self._runner.submit(call, inline=_waits(opts), results=outputs))

    def _begun(self, work: Work) -> Work:
        coalescing.note(self, work)
        self._fabric.calls.begin()
        return work

    # --- reductions ----------------------------------------------------------------------------

    @untraced
    def allreduce(self, tensors: TensorList | Tensor, opts: Any = None, *_: Any) -> Work:
        return self._allreduce([tensors] if isinstance(tensors, Tensor) else tensors, opts)

    @untraced
    def allreduce_coalesced(self, tensors: TensorList, opts: Any = None) -> Work:
        return self._allreduce(tensors, opts)

    def _allreduce(self, tensors: TensorList, opts: Any) -> Work:
        how = self._reduction("all_reduce", opts, tensors)
        body = Allreduce(how)
        return self._submit(FrameKind.ALLREDUCE, body, tensors, tensors, opts, detail=how.code)

    @untraced
    def reduce(self, tensors: TensorList, opts: Any = None) -> Work:
        opts = dist.ReduceOptions() if opts is None else opts
        how = self._reduction("reduce", opts, tensors)
        body = on_tensors.reduce(how, opts.rootRank)
        return self._submit(
            FrameKind.REDUCE, body, tensors, tensors, opts, root=opts.rootRank, detail=how.code
        )

    @untraced
    def reduce_scatter(self, outputs: TensorList, inputs: Nested, opts: Any = None) -> Work:
        for out, given in zip(outputs, inputs, strict=True):
            self._need_one_per_rank("reduce_scatter", given)
            own = given[max(self.rank(), 0)]
            if out.numel() != own.numel():
                raise ValueError(f"reduce_scatter of {own.numel()} elements into {out.numel()}")
        return self._reduce_scatter(outputs, [t for given in inputs for t in given], opts)

    @untraced
    def reduce_scatter_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Any = None
    ) -> Work:
        return self._reduce_scatter_each(outputs, inputs, opts)

    def _reduce_scatter_each(self, outputs: TensorList, inputs: TensorList, opts: Any) -> Work:
        for out, given in zip(outputs, inputs, strict=True):
            if given.numel() != out.numel() * self.size():
                raise ValueError(
                    f"reduce_scatter of {given.numel()} elements into {out.numel()} on each of "
                    f"{self.size()} ranks"
                )
        return self._reduce_scatter(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @untraced
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._reduce_scatter_each([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, outputs: TensorList, inputs: TensorList, opts: Any) -> Work:
        how = self._reduction("reduce_scatter", opts, inputs)
        body = on_tensors.reduce_scatter(how)
        return self._submit(FrameKind.REDUCE_SCATTER, body, outputs, inputs, opts, detail=how.code)

    # --- moving data ---------------------------------------------------------------------------

    @untraced
    def broadcast(self, tensors: TensorList | Tensor, opts: Any = None, *_: Any) -> Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        body = on_tensors.broadcast(root)
        return self._submit(FrameKind.BROADCAST, body, tensors, tensors, opts, root=root)

    @untraced
    def allgather(self, outputs: Nested, inputs: TensorList, opts: Any = None) -> Work:
        return self._allgather(outputs, inputs, opts)

    def _allgather(self, outputs: Nested, inputs: TensorList, opts: Any) -> Work:
        for mine, own in zip(outputs, inputs, strict=True):
            self._need_one_per_rank("all_gather", mine)
            if mine[max(self.rank(), 0)].numel() != own.numel():
                raise ValueError("all_gather: the output of the own rank differs from the input")
        flat = [t for mine in outputs for t in mine]
        return self._submit(FrameKind.ALLGATHER, on_tensors.allgather, flat, inputs, opts)

    @untraced
    def allgather_coalesced(self, outputs: Nested, inputs: TensorList, opts: Any = None) -> Work:
        """``outputs`` has one list per rank, as long as ``inputs``; ``allgather`` has it the other
        way round."""
        if len(outputs) != self.size() or any(len(mine) != len(inputs) for mine in outputs):
            raise ValueError(
                f"all_gather_coalesced of {len(inputs)} tensors needs one list of as many for each "
                f"of {self.size()} ranks, got lists of {[len(mine) for mine in outputs]}"
            )
        by_tensor = [[mine[i] for mine in outputs] for i in range(len(inputs))]
        return self._allgather(by_tensor, inputs, opts)

    @untraced
    def all_gather_single_coalesced(
        self, outputs: TensorList, inputs: TensorList, opts: Any = None
    ) -> Work:
        return self._all_gather_each(outputs, inputs, opts)

    def _all_gather_each(self, outputs: TensorList, inputs: TensorList, opts: Any) -> Work:
        for out, own in zip(outputs, inputs, strict=True):
            if out.numel() != own.numel() * self.size():
                raise ValueError(
                    f"all_gather of {own.numel()} elements of each of {self.size()} ranks into "
                    f"{out.numel()}"
                )
        return self._submit(FrameKind.ALLGATHER, on_tensors.allgather, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @untraced
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self._all_gather_each([output], [input], opts)

    _allgather_base = all_gather_single

    @untraced
    def gather(self, outputs: Nested, inputs: TensorList, opts: Any = None) -> Work:
        return self._gather(outputs, inputs, opts)

    def _gather(self, outputs: Nested, inputs: TensorList, opts: Any) -> Work:
        root = getattr(opts, "rootRank", 0)
        flat = outputs[0] if outputs else []
        if self.rank() == root:
            self._need_one_per_rank("gather", flat)
            if any(t.numel() != inputs[0].numel() for t in flat):
                raise ValueError("gather: outputs and input differ in size")
        body = on_tensors.gather(root)
        return self._submit(FrameKind.GATHER, body, flat, inputs, opts, root=root)

    @untraced
    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """The root's ``output`` gets the tensors of all ranks one after the other. torch 2.14 and
        later calls it."""
        if self.rank() != getattr(opts, "rootRank", 0):
            return self._gather([], [input], opts)
        whole = self.size() * input.numel()
        if output.numel() != whole:
            raise ValueError(f"gather: the output has {output.numel()} elements instead of {whole}")
        rows = output if output.dim() and len(output) % self.size() == 0 else output.view(-1)
        return self._gather([list(rows.tensor_split(self.size()))], [input], opts)

    @untraced
    def scatter(self, outputs: TensorList, inputs: Nested, opts: Any = None) -> Work:
        root = getattr(opts, "rootRank", 0)
        flat = inputs[0] if inputs else []
        if self.rank() == root:
            self._need_one_per_rank("scatter", flat)
            if any(t.numel() != outputs[0].numel() for t in flat):
                raise ValueError("scatter: inputs and output differ in size")
        body = on_tensors.scatter(root)
        return self._submit(FrameKind.SCATTER, body, outputs, flat, opts, root=root)

    @untraced
    def alltoall(self, outputs: TensorList, inputs: TensorList, opts: Any = None) -> Work:
        self._need_one_per_rank("all_to_all", outputs)
        self._need_one_per_rank("all_to_all", inputs)
        if outputs[max(self.rank(), 0)].numel() != inputs[max(self.rank(), 0)].numel():
            raise ValueError("all_to_all: own output and own input differ in size")
        return self._submit(FrameKind.ALLTOALL, on_tensors.alltoall, outputs, inputs, opts)

    @untraced
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        outputs = _split(output, output_split_sizes, self.size())
        inputs = _split(input, input_split_sizes, self.size())
        body = on_tensors.alltoall_single([len(t) for t in outputs], [len(t) for t in inputs])
        return self._submit(FrameKind.ALLTOALL, body, [output], [input], opts)

    alltoall_base = all_to_all_single

    # --- barriers ------------------------------------------------------------------------------

    @untraced
    def barrier(self, opts: Any = None) -> Work:
        return self._submit(FrameKind.BARRIER, on_tensors.barrier, [], [], opts)

    @untraced
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier; raises RuntimeError if it does not complete within ``timeout``."""
        self.barrier().wait(timeout or self._timeout)

    # --- checks --------------------------------------------------------------------------------

    def _reduction(self, name: str, opts: Any, tensors: Sequence[Tensor]) -> Reduction:
        named = opts is None or hasattr(opts, "reduceOp")
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM) if named else opts
        return reduction(op, tensors[0].dtype if tensors else torch.float32, name)

    def _type_code(self, kind: FrameKind, tensors: Sequence[Tensor]) -> int:
        kinds = {t.dtype for t in tensors}
        if len(kinds) > 1:
            raise ValueError(
                f"{_named(kind)} of mixed types, {', '.join(sorted(map(str, kinds)))}: "
                "call it once for each type"
            )
        return dtype_code(next(iter(kinds))) if kinds else 0

    def _need_one_per_rank(self, op: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"{op} needs one tensor for each of {self.size()} ranks, got {len(tensors)}"
            )


def _waits(opts: Any) -> bool:
    """Whether the caller waits for the operation at once."""
    return not getattr(opts, "asyncOp", True)


def _check_dense(kind: FrameKind, tensors: Sequence[Tensor]) -> None:
    if any(t.layout is not torch.strided for t in tensors):
        raise ValueError(
            f"{_named(kind)} needs dense tensors: call to_dense() first, "
            "or leave out the sparse=True that made them"
        )


def _named(kind: FrameKind) -> str:
    """The operation's name in torch."""
    name = kind.name.lower()
    return _NAMES.get(name, name)


def _split(tensor: Tensor, sizes: list[int] | None, ranks: int) -> tuple[Tensor, ...]:
    if sizes:
        if len(sizes) != ranks or sum(sizes) != len(tensor):
            raise ValueError(f"splits {sizes} do not fit {len(tensor)} rows on {ranks} ranks")
        return torch.split(tensor, sizes)
    if len(tensor) % ranks:
        raise ValueError(f"{len(tensor)} rows cannot be split evenly over {ranks} ranks")
    return torch.split(tensor, len(tensor) // ranks) if len(tensor) else (tensor,) * ranks

"""The API that a training script calls: ``register``, ``batches``, ``step``.

An active worker, a standby and a plain ``torchrun`` job use the same session; only the
:class:`StepHooks` behind it differ. The session calls them before the optimizer (``vote``) and
before each batch (``boundary``), and keeps data, random numbers and buffers consistent with their
results.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tmd.core.values.snapshots import wanted_every
from tmd.trainer.session import early_exit
from tmd.trainer.session.elastic import obstacle
from tmd.trainer.session.hooks import LOST_IN_SETUP, StepHooks
from tmd.trainer.session.kept_rank import KeptRankReport
from tmd.trainer.session.loop import BatchLoop
from tmd.trainer.session.optimizers import refuse_unusable
from tmd.trainer.session.repeatable import Repeatable
from tmd.trainer.session.step import Step
from tmd.trainer.session.step_cycle import StepCycle
from tmd.trainer.session.trace import Trace
from tmd.trainer.state.data import Position
from tmd.trainer.state.evaluations import Evaluations
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.placing import DataPlace, Loader
from tmd.trainer.state.replicas import Partition, partition
from tmd.trainer.state.seeds import base_seed
from tmd.trainer.state.state import Registry
from tmd.trainer.state.step_sampler import StepSampler
from tmd.trainer.state.unwrapping import Counter

T = TypeVar("T")

log = logging.getLogger("tmd.trainer")


class Session:
    """One worker's part in a job. Created by :func:`tmd.trainer.join`."""

    def __init__(self, hooks: StepHooks, trace: Trace | None = None) -> None:
        self._hooks = hooks
        self._cycle = StepCycle(hooks, trace or Trace(), lambda torn: self._loop.settle(torn))
        self._loop = BatchLoop(self._cycle, lambda: self._base, self._place)
        self._registry: Registry | None = None
        self._counters: dict[str, Counter] = {}
        self._common: dict[str, Counter] = {}
        """Counters that the script made before :meth:`build`, so that every role has them."""
        self._local: LocalState | None = None
        self._own_seed = 0
        self._data_mesh: DeviceMesh | None = None
        self._alike: Partition = ()
        self._wrapped: list[nn.Module] = []
        self._build: Callable[[Session], object] | None = None
        self._awaited = False
        """Whether the objects that are being built still have to be registered."""
        self._evaluations = Evaluations(hooks.warn)
        self._kept_rank = KeptRankReport(self, hooks)
        self.built: Any = None
        """Return value of the latest call of the function given to :meth:`build`."""

    # --- properties -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank held now. A standby reports the rank it shadows, else the last of its role."""
        return self._hooks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job; never changes."""
        return self._hooks.status.world_size

    @property
    def step_number(self) -> int:
        """Index of the current step, from 0. Ended ``batches`` calls and repeatables count too."""
        return self._hooks.status.step

    @property
    def shadowing(self) -> bool:
        """Whether this is a standby's step, which is never committed: print and save only while
        this is false, even on rank 0, since a standby may shadow any rank."""
        return self._hooks.shadowing

    @property
    def why_not_done(self) -> str:
        """Why the script must not end with status 0 now, in words; empty if it may."""
        return self._loop.why_not_done

    @property
    def skipped(self) -> bool:
        """False once this worker is at the end of the latest ``batches`` call. True in its loop,
        after a ``break``, and if the checkpoint or the rank taken over is in a later call."""
        return self._loop.skipped

    @property
    def position(self) -> Position:
        """The next uncommitted batch: number of its ``batches`` call, and its number in it."""
        feed = self._loop.feed
        return Position() if feed is None else feed.position

    # --- set-up -----------------------------------------------------------------------------------

    def build(self, function: Callable[[Session], T]) -> T:
        """Build this rank's part of a job whose ranks have different models or optimizers.

        Args:
            function: makes model and optimizer for ``session.rank`` and the meshes, calls
                :meth:`register`, returns what the loop needs. It is called now, and again between
                two batches when a standby has to serve another role: read :attr:`built` again in
                each step. Make groups and meshes before this call.

        Raises:
            RuntimeError: called twice; ``function`` did not register, or made process groups.
        """
        if self._build is not None or self._registry is not None:
            raise RuntimeError("call session.build() once, and register() only in its function")
        self._build, self._common = function, dict(self._counters)
        self._hooks.set_builder(self._make)
        return cast(T, self.built)

    def _make(self) -> None:
        """Call the script's function for the rank that this worker holds or reports."""
        assert self._build is not None
        self._awaited, self.built = True, None
        self._counters = dict(self._common)
        gc.collect()  # a device may not hold both the old and the new objects
        self.built = self._build(self)
        if self._awaited:
            raise RuntimeError("the function given to session.build() must call register()")
        if (feed := self._loop.feed) is not None:
            # Shadow iterations follow, and the loader may have no batches left.
            feed.seek(Position(feed.call))

    def counter(self, name: str, value: Any) -> Counter:
        """A plain value that moves with the rank, in :attr:`Counter.value`, such as a best loss.

        It must be equal on all ranks of equal state: take the minimum of a reduced loss, say. Call
        before :meth:`register`, which names it ``name``; a second call returns the same one.

        Raises:
            RuntimeError: called after :meth:`register`.
        """
        if name not in self._counters and self._registry is not None and not self._awaited:
            raise RuntimeError(f"call session.counter({name!r}, ...) before session.register()")
        return self._counters.setdefault(name, Counter(value))

    def register(
        self,
        *,
        model: object,
        optimizer: object,
        replicas: Iterable[Iterable[int]] | None = None,
        data_mesh: DeviceMesh | None = None,
        snapshots: int | None = None,
        elastic: bool = False,
        **others: object,
    ) -> None:
        """Name the state that moves with this rank: everything that a step changes.

        Args:
            model: an ``nn.Module``, bare or in DDP, whose buckets it fixes, or a list of them.
            optimizer: a ``torch.optim.Optimizer`` or a list of them. The state of a
                ``ZeroRedundancyOptimizer`` is unique; use :meth:`build` with it.
            replicas: groups of ranks whose state is equal after each step. By default it follows
                from DDP and DTensor meshes. The state of a bare module counts as unique, so that
                no other rank replaces it. See :func:`tmd.trainer.replicas_along`.
            data_mesh: mesh of one dimension along which ranks have different batches, such as
                ``mesh["dp"]``, if other ranks share a batch (tensor parallel). By default every
                rank has its own batches.
            snapshots: steps between two snapshots in the memory of two hosts, to which all ranks
                return if a unique state is lost. By default 10 if a state is unique, else 0: none.
            elastic: if no standby is left, other workers compute for a lost rank. Only for plain
                DDP whose collectives run in steps, before the optimizer, independent of each other.
            others: schedulers, a ``GradScaler``, anything with ``state_dict``/``load_state_dict``.

        Raises:
            TypeError: the state of an object cannot move, or an optimizer overlaps with DDP.
            ValueError: ``replicas`` is wrong for some rank, ``snapshots`` is negative, or
                ``requires_grad`` was changed after DDP was built.
            RuntimeError: called twice, or a rank was lost during set-up.
        """
        first = self._registry is None
        self._check_due()
        registry, local = self._register_all({"model": model, "optimizer": optimizer, **others})
        self._data_mesh = data_mesh
        models = model if isinstance(model, list | tuple) else [model]
        self._wrapped[:] = [m for m in models if isinstance(m, nn.Module)]
        alike = self._alike = partition(self._wrapped, replicas, self.world_size, registry.divided)
        snapshots = wanted_every(snapshots, alike, self.world_size)
        self._hooks.registered(registry, self._wrapped, local, alike, snapshots)
        if elastic:
            self._hooks.adoption.allow(self._rigidity(local, snapshots))
        self._awaited = False
        if first:
            self._own_seed = base_seed()
            self._hooks.seeds(self._own_seed)

    def _check_due(self) -> None:
        """Raises RuntimeError: nothing can be registered now."""
        if self._registry is not None and not self._awaited:
            raise RuntimeError("session.register() was called twice; name all objects in one call")
        if self._hooks.health.broken:
            raise RuntimeError(LOST_IN_SETUP)

    def _rigidity(self, local: LocalState, snapshots: int) -> str:
        """Why no other rank can compute for this one; empty if nothing registered forbids it."""
        size, built = self.world_size, self._build is not None
        given = (self._wrapped, self._alike, local)
        return obstacle(*given, size=size, snapshots=snapshots, built=built)

    def _register_all(self, objects: dict[str, object]) -> tuple[Registry, LocalState]:
        """Register ``objects``. After a rebuild they replace those registered before."""
        if twice := sorted(objects.keys() & self._counters.keys()):
            raise ValueError(f"register() and session.counter() both name {', '.join(twice)}")
        registry = Registry({**objects, **self._counters})
        refuse_unusable(registry.optimizers)
        if self._registry is None or self._local is None:
            self._registry, self._local = registry, LocalState(registry)
        else:
            self._registry.renew({**objects, **self._counters})
            self._local.renew()
        self._cycle.watch(self._registry, self._local)
        return self._registry, self._local

    def checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        every: int,
        keep: int = 2,
        resume: bool = True,
        at_end: bool = False,
    ) -> None:
        """Write a checkpoint every ``every`` steps, and resume from the newest one in ``path``.

        Call once after ``register``. The ``batches`` call in which the checkpoint was taken loads
        it; earlier calls end at once. Plain ``torch.distributed.checkpoint`` reads checkpoints.

        Args:
            path: a folder for this job only, the same for all ranks.
            every: number of steps between checkpoints.
            keep: number of complete checkpoints to keep.
            resume: false to start from scratch; ``path`` must then hold no checkpoint.
            at_end: whether to write one when the loader of a ``batches`` call has no more batches,
                too. After a ``break`` there is none.

        Raises:
            ValueError: ``every`` or ``keep`` is below one, or an object is registered as ``rank0``.
            ConfigError: ``path`` cannot be used.
            StateMismatch: the newest checkpoint cannot be divided among these ranks.
            RuntimeError: not between ``register`` and ``batches``, a rank was lost meanwhile, or an
                optimizer is divided among ranks.
        """
        if self._registry is None or self._loop.calls or self._loop.saving is not None:
            raise RuntimeError("call session.checkpoint() once, between register() and batches()")
        # Imported here, since other jobs need not wait for it.
        from tmd.trainer.checkpoints.saving import Saving, ordered

        order, hooks = ordered(path, every, keep, at_end=at_end), self._hooks
        saving = self._loop.saving = Saving(
            order, self._registry, lambda: self._alike, self.world_size, hooks.saved, hooks.verdict
        )
        if not hooks.shadowing:
            saving.choose(self.rank, hooks.gathered, resume=resume)

    def repeatable(
        self, function: Callable[[], T], then: Callable[[T], object] | None = None, name: str = ""
    ) -> Callable[[], None]:
        """Make ``function`` safe outside of a step, for an evaluation or a gather.

        Call the returned function between a step and the next batch, or after a loop: once in each
        such place, on every rank, even if ``step.counts`` is false; after a broken step it does
        nothing. ``function`` is run again if a rank is lost in it, and a worker that takes a lost
        rank runs it from within :meth:`batches`. All ranks vote on it, and it counts as a step.

        Args:
            function: must depend on registered objects only, and on :attr:`rank`. What its result
                changes for later steps belongs in it, on registered objects: a best loss, say.
            then: called with the result after the vote, on every worker that holds a rank: print
                and save there, without collectives.
            name: the same on all ranks; by default that of ``function``.

        Raises:
            ValueError: the name is missing or taken.
            RuntimeError: called after :meth:`batches`.
        """
        named = name or getattr(function, "__name__", "")
        return self._loop.repeatables.add(Repeatable(named, function, then))

    def on_handover(self, function: Callable[[], object]) -> None:
        """Call ``function`` on this worker when a plan has given its rank to another one, before
        this worker stands by or exits: flush and close there what it has written for the rank.

        Until the function returns, ``tmd drain --wait`` waits, and this worker takes no rank. So it
        must be short, and must not call collectives. If another rank is lost in the same move, it
        is called only after the worker stands by. It is not called after a loss of this worker, nor
        for ranks that an elastic job gives back.
        """
        self._hooks.handovers.add(function)

    def sampler(self, size: int, batch_size: int, steps: int, seed: int = 0) -> StepSampler:
        """A sampler without state: see :class:`tmd.trainer.state.step_sampler.StepSampler`."""
        return StepSampler(size, batch_size, steps, self._place, seed)

    def placed(self, loader: Loader) -> Iterable[Any]:
        """``loader`` divided for the rank held now, in an order that follows from the step.

        For each iteration of an evaluation's loader, in a function of :meth:`repeatable`.

        Raises:
            ValueError: ``loader`` divides the data in another way, or is fixed to one rank's part.
        """
        return self._evaluations.placed(loader, self._place(), self.step_number)

    def _place(self) -> DataPlace:
        if self._data_mesh is None:
            return DataPlace(self.rank, self.world_size)
        return DataPlace(self._data_mesh.get_local_rank(), self._data_mesh.size())

    # --- the loop ---------------------------------------------------------------------------------

    def batches(
        self,
        loader: Loader,
        *,
        accumulate: int = 1,
        partial: bool = False,
        leave_early: bool = False,
    ) -> Iterator[Any]:
        """Yields the batches of ``loader``, each again if its step must be repeated.

        A repeat starts at the top of the loop's body. Code between ``batches()`` and the ``with``
        block runs again with the same batch and random numbers, and its effects are not undone:
        step a registered scheduler, or count, in the block or after it.

        Args:
            loader: any iterable of batches that yields the same ones when iterated again; or a
                function that takes a :class:`DataPlace` and returns the loader for that part of the
                data, for loaders that are fixed to the part for which they are built.
            accumulate: with k > 1, lists of k batches for one step (gradient accumulation).
            partial: whether a last incomplete list is given, too; else it is dropped.
            leave_early: leave a step that a lost rank has broken at its next module, instead of
                computing it to its end. An exception may then leave the block in any module, and
                hooks of activations may be called with ``None``.

        Raises:
            SystemExit: this worker is no longer needed (drained, or the job has ended).
            RuntimeError: ``register`` was not called, or ranks run unequal numbers of steps.
            StateMismatch: the checkpoint belongs to another model.
            ValueError: ``loader`` divides the data otherwise, or keeps the part of one rank; or
                a step of this model cannot be left early.
        """
        if self._registry is None or self._local is None:
            raise RuntimeError("call session.register(model=..., optimizer=...) before batches()")
        self._kept_rank.search(sys._getframe(1))
        found = self._loop.run(loader, self._local, accumulate, partial)
        self._cycle.leaves_early = leave_early
        if not leave_early:
            return found
        early_exit.refuse(self._wrapped, built=self._build is not None)
        return early_exit.left_early(found, lambda: self._cycle.can_be_left)

    def step(self) -> Step:
        """Context of one training step; the optimizer is called inside it.

        A step that the loss of a rank has poisoned ends silently, and ``batches`` yields its batch
        again. Code after the block runs even then. Its effects on registered schedulers and other
        registered objects are undone; other code there should check :attr:`Step.counts`.
        """
        if self._registry is None or self._loop.feed is None:
            raise RuntimeError("session.step() belongs inside 'for batch in session.batches(...)'")
        self._kept_rank.report()
        return Step(self._cycle)

    def begin(self) -> Step:
        """Begin a step without a ``with`` block, for a loop that one does not own: run its parts by
        :meth:`Step.run`, and end it by :meth:`Step.end`.

        Raises:
            RuntimeError: not inside ``batches``, or inside one with ``leave_early``.
        """
        if self._cycle.leaves_early:
            raise RuntimeError("leave_early=True needs session.step(), not session.begin()")
        return self.step().__enter__()

    @property
    def _base(self) -> int:
        return self._hooks.seeds(self._own_seed)[self.rank]

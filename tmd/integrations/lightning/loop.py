"""The fit loop of :mod:`tmd.integrations.lightning`: epochs of Lightning over batches of a session.

One ``batches`` call is one epoch, counted from the one in which training began. A step is
Lightning's ``advance`` of each batch of it: the vote comes in the optimizer, so what Lightning does
after it belongs to a committed step. Validation, checkpoints and the end of an epoch contain
collectives. They run between two steps, and again if a rank is lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.utils._pytree import tree_unflatten

from tmd.integrations.epoch import Epoch
from tmd.integrations.lightning.metrics import RepeatedMetrics
from tmd.integrations.lightning.progress import LoopProgress
from tmd.integrations.lightning.refused import (
    own_hooks,
    refuse,
    refuse_logged,
    refuse_loops,
    refuse_misplaced,
    refuse_resumed,
    refuse_skipped,
)
from tmd.trainer import StepResult

if TYPE_CHECKING:
    from tmd.integrations.lightning.strategy import TmdStrategy

Effect = Callable[[], object]
"""Something to write once it counts."""


class HeldLogger:
    """Stands for a logger whose calls are held back."""

    def __init__(self, logger: Any, effects: list[Effect], unusable: list[Any]) -> None:
        """``unusable``: loggers whose calls are dropped."""
        self._logger, self._effects, self._unusable = logger, effects, unusable

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Scripts ask for the type of a logger."""
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._logger, name)
        if not callable(value) or name == "experiment":
            return value
        return lambda *args, **kwargs: self._effects.append(
            partial(self._call, value, *args, **kwargs)
        )

    def _call(self, method: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        if not any(self._logger is each for each in self._unusable):
            method(*args, **kwargs)


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over batches, of which the fit loop calls only the parts."""

    def _broadcast_sigterm_tensor(self) -> None:
        """No rank has to know of another rank's signal: tmd moves ranks away."""


class SessionFitLoop(_FitLoop):
    """Lightning's loop over epochs, with batches and steps of a session."""

    strategy: TmdStrategy
    progress: LoopProgress
    metrics: RepeatedMetrics
    _data_fetcher: Any

    @classmethod
    def of(cls, loop: _FitLoop, strategy: TmdStrategy) -> SessionFitLoop:
        """A loop with the configuration of ``loop``, which it replaces."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(loop))
        made.epoch_loop = EpochLoop.__new__(EpochLoop)
        made.epoch_loop.__dict__.update(vars(loop.epoch_loop))
        made.strategy, made.progress = strategy, LoopProgress(loop.trainer, made)
        made.metrics = RepeatedMetrics()
        return made

    def setup_data(self) -> None:
        super().setup_data()
        fetcher = self._data_fetcher
        # Lightning may have set up the data before this loop was made: a hook asked for its length.
        if fetcher is None or (isinstance(fetcher, _Given) and fetcher.loop is self):
            return
        refuse(self.trainer)  # again, since hooks have run in between
        refuse_loops(self, fetcher)
        fetcher.teardown()
        self._data_fetcher = _Given(self)

    def run(self) -> None:
        if self.strategy.session.shadowing:
            # A standby gets the state of a rank, which may have begun before the checkpoint.
            self.progress.forget_checkpoint()
            _forget_restart(self)
        self.setup_data()
        if self.skip:
            return
        refuse_resumed(self)
        self.reset()
        self.progress.began = self.epoch_progress.current.processed
        self._set_up_validation()
        self.on_run_start()
        self.epoch_progress.current.completed = self.epoch_progress.current.processed
        _forget_restart(self)
        try:
            self._run_epochs()
        except SystemExit:
            self.strategy.leave()
            raise
        self.on_run_end()

    def _run_epochs(self) -> None:
        session = self.strategy.session
        between = self._between_steps()
        assert self._combined_loader is not None
        (loader,) = self._combined_loader.flattened
        # A worker that joins late walks past epochs, and then has another state than it began with.
        for call in count():
            if self.done:
                return
            accumulate = self.trainer.accumulate_grad_batches
            begin, limit = partial(self._begin, loader, call), int(self.max_batches)
            batches = Epoch(loader, begin, self._ends_before, limit=limit)
            for drawn in session.batches(batches, accumulate=accumulate, partial=True):
                refuse_misplaced(self, call + self.progress.began)
                if self._is_due_after(drawn if accumulate > 1 else [drawn]):
                    between()
            # Does nothing on a worker that walks past, unless the other ranks run it now.
            if session.skipped or self._in_epoch:
                between()

    def _begin(self, loader: Any, call: int) -> None:
        """Prepare the loader for the epoch of ``call``, in the job of the rank that is held now."""
        epoch = call + self.progress.began
        _set_sampler_epoch(loader, epoch)
        # Lightning leaves these to the script's hook, which a worker that joins does not run.
        if not own_hooks(self.trainer, "on_train_epoch_start"):
            return
        for name in ("dataset", "batch_sampler"):
            set_epoch = getattr(getattr(loader, name, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    @property
    def _in_epoch(self) -> bool:
        """Whether an epoch has begun and not ended."""
        counters = self.epoch_progress.current
        return bool(counters.ready != counters.completed)

    @property
    def ended_within_epoch(self) -> bool:
        """Whether the limit of steps has ended training before the end of an epoch."""
        loop = self.epoch_loop
        at_limit = loop.max_steps != -1 and loop.global_step >= loop.max_steps
        return bool(at_limit and loop.batch_idx + 1 < self.max_batches)

    def _ends_before(self, batch: int) -> Any:
        """Whether training ends before the batch of this number. A joiner also draws those before
        the position of its rank, whose state may already say that training ends."""
        return batch >= self.strategy.session.position.index and self._is_stopped()

    def _is_stopped(self) -> Any:
        """Whether training ends within an epoch."""
        loop, trainer = self.epoch_loop, self.trainer
        at_limit = loop.max_steps != -1 and loop.global_step >= loop.max_steps
        return at_limit or (trainer.should_stop and self._can_stop_early)

    # --- a step -----------------------------------------------------------------------------------

    def _is_due_after(self, batches: list[Any]) -> bool:
        """Run one step; returns whether there is work between it and the next one."""
        self.strategy.set_world_ranks()
        self.strategy.loss = None
        with self.strategy.session.step() as step:
            with self.strategy.held() as effects:
                self._train(batches)
            if self.strategy.loss is not None:
                step.record(self.strategy.loss)
        if step.counts:
            self.strategy.set_world_ranks()  # a standby may have taken the rank in this step
            for effect in effects:
                effect()
        due = self.progress.pending and not self.progress.last
        return due and step.result is not StepResult.SPOILT

    def _train(self, batches: list[Any]) -> None:
        if not self._in_epoch:
            self.on_advance_start()
            self.epoch_loop.reset()
        fetcher = self._data_fetcher
        for number, batch in enumerate(batches, 1):
            fetcher.batch = batch
            with self._undone_if_broken(), self._without_checkpoints():
                self._advance(fetcher)
            refuse_logged(self.epoch_loop)
            if number == len(batches) and self._is_due():
                self.progress.pending = True
                self.progress.last = bool(self.epoch_loop._is_training_done)
            else:
                # A hook may ask for a stop within a step. Lightning would validate at once.
                self.epoch_loop._skip_next_val = True
                self.epoch_loop.on_advance_end(fetcher)
        self.progress.keep_metrics()

    def _advance(self, fetcher: Any) -> None:
        try:
            self.epoch_loop.advance(fetcher)
        except StopIteration:
            refuse_skipped(self.epoch_loop)
            raise

    def _is_due(self) -> Any:
        """Whether collectives are due between this step and the next one."""
        loop = self.epoch_loop
        return (
            loop._is_training_done
            or loop._should_check_val_fx(self._data_fetcher)
            or any(
                each._every_n_train_steps and not loop.global_step % each._every_n_train_steps
                for each in self._checkpoints
            )
        )

    @property
    def _checkpoints(self) -> list[Any]:
        return [c for c in self.trainer.callbacks if isinstance(c, ModelCheckpoint)]

    @contextmanager
    def _without_checkpoints(self) -> Iterator[None]:
        """They run collectives, so they are called between two steps."""
        callbacks = self.trainer.callbacks
        kept = [c for c in callbacks if not isinstance(c, ModelCheckpoint)]
        self.trainer.callbacks = kept
        try:
            yield
        finally:
            self.trainer.callbacks = callbacks

    # --- between two steps ------------------------------------------------------------------------

    def _between_steps(self) -> Callable[[], None]:
        def write(effects: list[Effect]) -> None:
            self.strategy.set_world_ranks()
            self.metrics.forget()
            for effect in effects:
                effect()

        return self.strategy.session.repeatable(self._finish_step, write, "lightning")

    def _finish_step(self) -> list[Effect]:
        """Validate, save and end the epoch, as far as due."""
        self.strategy.set_world_ranks()
        loader = self.epoch_loop.val_loop._combined_loader
        for each in [] if loader is None else loader.flattened:
            self.strategy.session.placed(each)
        at = self.progress.runs, self.strategy.session.rank
        self.metrics.begin(at, self.trainer.lightning_module)
        with self.strategy.held() as effects, self._undone_if_broken(modes=True):
            self._finish()
        self.progress.runs += 1
        return effects

    @contextmanager
    def _undone_if_broken(self, *, modes: bool = False) -> Iterator[None]:
        """A repeat must not find the half of what an error has ended. ``modes``: it evaluates."""
        trainer, module = self.trainer, self.trainer.lightning_module
        forward = module.forward  # Lightning replaces it for the length of a forward
        before = [(each, each.training) for each in module.modules()] if modes else []
        try:
            yield
        except BaseException:
            module.forward = forward
            self.epoch_loop.val_loop._results.reset()
            trainer.training = True
            trainer._logger_connector.reset_results()
            for each, mode in before:
                each.training = mode
            raise

    def _finish(self) -> None:
        in_step = self.progress.pending
        if in_step:
            self._save()
            self.epoch_loop.on_advance_end(self._data_fetcher)
            self.progress.pending = False
            self.progress.keep_metrics()
        if not in_step or self.progress.last or self._is_stopped():
            self.on_advance_end()

    def _save(self) -> None:
        """Save checkpoints that are due in a step, with the counters of that moment."""
        counters = self.epoch_loop.batch_progress
        trackers = (counters.total, counters.current)
        for tracker in trackers:
            tracker.completed -= 1
        for each in self._checkpoints:
            index = self.epoch_loop.batch_idx
            each.on_train_batch_end(self.trainer, self.trainer.lightning_module, None, None, index)
        for tracker in trackers:
            tracker.completed += 1

    def _set_up_validation(self) -> None:
        """On all ranks now, since a rank that joins later would do it alone."""
        if self.trainer.enable_validation:
            self.trainer.validating = True
            self.epoch_loop.val_loop.setup_data()
            self.trainer.training = True


class _Given(_DataFetcher):
    """Gives Lightning the batches that the session has drawn."""

    def __init__(self, loop: SessionFitLoop) -> None:
        super().__init__()
        self.loop = loop
        self.batch: Any = None

    def __next__(self) -> tuple[Any, int, int]:
        index = self.loop.epoch_loop.batch_idx + 1
        self.done = index + 1 >= self.loop.max_batches
        combined = self.loop._combined_loader
        assert combined is not None
        # The script may have returned its loader in a list or a dictionary.
        return tree_unflatten([self.batch], combined._spec), index, 0


def _forget_restart(loop: _Loop) -> None:
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for child in vars(loop).values():
        if isinstance(child, _Loop):
            _forget_restart(child)

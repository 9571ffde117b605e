"""The ``Trainer`` whose steps a session repeats if a rank is lost."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterable
from functools import partial
from math import ceil
from typing import Any

import torch
import transformers
from accelerate import PartialState
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerState, optimization
from transformers.trainer_utils import get_last_checkpoint

from tmd.core.values.checkpoints import complete
from tmd.integrations.accelerate import begin_step, generators_kept, refuse_switching
from tmd.integrations.epoch import Epoch
from tmd.integrations.transformers.arguments import TrainingArguments, refuse, session
from tmd.integrations.transformers.attributes import UnnamedAttributes, refuse_missing
from tmd.integrations.transformers.callbacks import HeldCall, HeldCallbacks
from tmd.integrations.transformers.checkpoints import SavingTrainer, refuse_apart
from tmd.integrations.transformers.data import refuse_data, set_epoch
from tmd.integrations.transformers.progress import Tally, TrainerProgress
from tmd.integrations.transformers.wrapping import allow_wrapping, refuse_unwrapped
from tmd.trainer import Step, StepResult

OVERRIDDEN = (
    "_prepare_for_training",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "_get_output_dir",
    "_finalize_training",
)
"""Private methods of the original, without which nothing would be protected."""
BY_METRIC = (ReduceLROnPlateau, getattr(optimization, "GreedyLR", ReduceLROnPlateau))
"""Schedulers that step after an evaluation."""

log = logging.getLogger("tmd.trainer")

if unknown := [name for name in OVERRIDDEN if not hasattr(transformers.Trainer, name)]:
    raise ImportError(
        f"tmd.integrations.transformers cannot use transformers {transformers.__version__}, whose "
        f"Trainer has no {', '.join(unknown)}: pip install 'tmd-trainmover[transformers]'"
    )


class Trainer(SavingTrainer):
    """As in transformers, but a standby can take over a rank while it trains."""

    moved_attributes: tuple[str, ...] = ()
    """Attributes that a derived class changes while it trains. They move with a rank. They must be
    equal on all ranks, and plain values, tensors, or lists and dictionaries of these."""

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        above = set(vars(self))  # a derived class may make some before this
        args = args or TrainingArguments("tmp_trainer")
        refuse(args, model)
        if type(self)._run_epoch is not Trainer._run_epoch:
            raise TypeError(
                f"{type(self).__name__} has a _run_epoch of its own: what it trains would not be "
                "repeated after a loss. Override training_step or compute_loss instead"
            )
        self._tally = Tally()
        self._run: dict[str, Any] = {}
        self._stops: bool | None = None
        self._late = False
        self._history, self._gathers = (-1, 0), False
        super().__init__(model, args, *more, **named)
        self.callback_handler.__class__ = HeldCallbacks
        self._base_names = {"_base_names", *vars(self)} - above

    # --- numbers that differ by rank --------------------------------------------------------------

    @property
    def _tr_loss(self) -> Tensor:
        return self._tally.loss

    @_tr_loss.setter
    def _tr_loss(self, value: Tensor) -> None:
        if value is not self._tally.loss:
            self._tally.loss.copy_(value)

    @property
    def current_flos(self) -> float:
        """Floating-point operations of this rank since they were last summed."""
        return float(self._tally.flos)

    @current_flos.setter
    def current_flos(self, value: float) -> None:
        self._tally.flos.fill_(value)

    # --- one rank after another -------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Whether this process holds rank 0; never while it shadows."""
        return bool(super().is_world_process_zero()) and not session().shadowing

    def is_local_process_zero(self) -> bool:
        """Whether this process reports for its host; never while it shadows."""
        return bool(super().is_local_process_zero()) and not session().shadowing

    def _take_rank(self) -> None:
        """Between two steps: be the rank that this worker holds or shadows now."""
        PartialState().process_index = self.accelerator.state.process_index = session().rank
        state, new = self.state, self.is_world_process_zero()
        old, state.is_world_process_zero = state.is_world_process_zero, new
        state.is_local_process_zero = self.is_local_process_zero()
        if new and not old:
            moved = copy.deepcopy(self._progress.state_dict())
            with generators_kept():
                self.callback_handler.begin_again(self.args, state, self.control)
            self._progress.load_state_dict(moved)

    # --- set-up -----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *more: Any, **named: Any) -> Any:
        """As in transformers. ``True`` means the newest checkpoint of the session, if it has one,
        else the newest checkpoint-N, and with neither the beginning.

        A standby reads no checkpoint: its state is that of the rank which it takes, and the newest
        checkpoint may be of a later step than the one with which the job began.
        """
        refuse_missing(self)
        names = vars(self).keys() - self._base_names
        self._unnamed = UnnamedAttributes(self, names.difference(self.moved_attributes))
        newest = resume_from_checkpoint is True
        self._late = newest or session().shadowing
        if session().shadowing:
            resume_from_checkpoint = None
        else:
            resume_from_checkpoint = self._agreed(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *more, **named)

    def _has_session_checkpoint(self) -> bool:
        folder = self.args.session_folder
        return bool(folder) and os.path.isdir(folder) and bool(complete(os.listdir(folder)))

    def _agreed(self, asked: Any) -> Any:
        """What the original is to resume from. Raises RuntimeError: ranks would begin apart."""
        if asked is not True:
            refuse_apart(os.path.basename(os.path.normpath(asked)) if asked else "")
            return asked
        folder = self.args.output_dir
        if self._has_session_checkpoint():
            refuse_apart("the session")
            return None
        newest = get_last_checkpoint(folder) if os.path.isdir(folder) else None
        refuse_apart(os.path.basename(newest or ""))
        if newest is None:
            log.warning("%s has no checkpoint: training begins", folder)
        return newest

    def _prepare_for_training(self, max_steps: int, loader: Any, resumed: Any) -> Any:
        allow_wrapping(self)
        model, loader = super()._prepare_for_training(max_steps, loader, resumed)
        args, joined = self.args, session()
        refuse_unwrapped(model, args.world_size)
        refuse_switching(self.accelerator._optimizers)
        refuse_data(loader, args)
        self._total_loss_scalar, self._globalstep_last_logged = 0.0, self.state.global_step
        self._initial_global_step = self.state.global_step
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        begun = os.path.normpath(resumed) if resumed else ""
        self._progress = TrainerProgress(self, begun, late=self._late)
        joined.register(
            model=[model, self._tally.to(args.device)],
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            progress=self._progress,
        )
        if args.session_folder:
            joined.checkpoint(args.session_folder, every=self._save_steps(max_steps))
        self._measure_all = joined.repeatable(self._measure, self._publish, name="transformers")
        return model, loader

    def _save_steps(self, max_steps: int) -> int:
        """Steps between two saves, by the arguments: only some workers have the state of a
        checkpoint-N."""
        wanted = TrainerState()
        wanted.compute_steps(self.args, max_steps)
        by_epoch = self.args.save_strategy == "epoch"
        steps: int = (
            ceil(max_steps / self.state.num_train_epochs) if by_epoch else wanted.save_steps
        )
        return steps

    # --- the loop ---------------------------------------------------------------------------------

    def _run_epoch(self, **run: Any) -> None:
        self._run, epoch, joined = run, run["epoch"], session()
        if self._stops is not None:
            # This worker skipped an epoch. Whether training ends is as in the state that it took.
            self.control.should_training_stop, self._stops = self._stops, None
        if epoch == run["epochs_trained"]:
            self._progress.set_start(epoch, run["steps_trained_in_current_epoch"])
            for _ in range(epoch):
                # A position counts the calls. With the empty ones it is the number of the epoch.
                for _ in joined.batches([]):
                    pass
        count = self.args.gradient_accumulation_steps
        for drawn in joined.batches(self._batches(epoch), accumulate=count, partial=True):
            self._take_rank()
            if self._step(drawn if count > 1 else [drawn]) is StepResult.SPOILT:
                continue
            handler = self.callback_handler
            self.control = now = handler.on_step_end(self.args, self.state, self.control)
            self._stop_early()
            if self._ends or now.should_log or now.should_evaluate or now.should_save:
                self._measure_all()
        self._end_epoch(epoch)

    def _batches(self, epoch: int) -> Epoch:
        loader, progress = self._run["train_dataloader"], self._progress
        # Accelerate's own iterator synchronises generators and reads one batch ahead.
        plain = getattr(loader, "base_dataloader", loader)
        return Epoch(
            plain,
            begin=partial(set_epoch, loader, epoch),
            ends=lambda number: progress.is_past(epoch) or progress.stopped == [epoch, number],
            skip=partial(progress.left_out, epoch),
        )

    def _end_epoch(self, epoch: int) -> None:
        joined = session()
        if joined.skipped:
            self._measure_all()  # runs only if a rank was lost in it, after the loop
        elif self._progress.is_past(epoch):
            pass  # the rank taken over is still on its way to the epoch in which training began
        elif self._progress.values["epoch"] != epoch and not self._progress.left_out(epoch):
            log.warning("epoch %d has no batch: training ends", epoch)
            self.control.should_training_stop = True
        elif not self._ends:
            # The length of the data was not known, so nothing was due at their end.
            self._measure_all()
        if joined.skipped:
            # The rank taken over is in a later epoch. Its decision to end training waits for that.
            self._stops = self.control.should_training_stop
            self.control.should_training_stop = False

    def _step(self, samples: list[Any]) -> StepResult:
        """One step. What the script logs in it counts only if the step does."""
        handler, history = self.callback_handler, self.state.log_history
        before = len(history)
        held: list[HeldCall] = []
        with session().step() as step:
            handler.held = held
            try:
                self._update(step, samples)
            finally:
                handler.held = None
        assert step.result is not None
        if step.result is not StepResult.COMMITTED:
            del history[before:]
            return step.result
        self._unnamed.warn()
        self._take_rank()  # a standby may have taken it in this step
        for event, state, more in held:
            state.is_world_process_zero = self.state.is_world_process_zero
            state.is_local_process_zero = self.state.is_local_process_zero
            handler.release(event, self.args, state, self.control, **more)
        return step.result

    def _update(self, step: Step, samples: list[Any]) -> None:
        """One step: what the loop of transformers does with these batches up to ``on_step_end``."""
        args, state, handler = self.args, self.state, self.callback_handler
        run, model, accelerator = self._run, self._run["model"], self.accelerator
        begin_step(accelerator)
        left_out = self._progress.left_out(run["epoch"])
        done = left_out + session().position.index + len(samples)
        samples, items = self.get_batch_samples(iter(samples), len(samples), args.device)
        self.current_gradient_accumulation_steps = len(samples)
        total = torch.zeros((), device=args.device)
        self.control = handler.on_step_begin(args, state, self.control)
        always = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for number, inputs in enumerate(samples, 1):
            last = number == len(samples)
            accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last or always else accelerator.no_sync(model):
                loss = self.training_step(model, inputs, items)
            total += loss
            if args.logging_nan_inf_filter and not torch.isfinite(loss):
                loss = self._tr_loss / (1 + state.global_step - self._globalstep_last_logged)
            self._tr_loss += loss
            self.current_flos += float(self.floating_point_ops(inputs))
            self._track_num_input_tokens(inputs)
            if not last:
                self.control = handler.on_substep_end(args, state, self.control)
        norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        norm = self._get_grad_norm(model, grad_norm=norm)
        self._tally.grad_norm.fill_(float(norm))
        self.control = handler.on_pre_optimizer_step(args, state, self.control)
        step.record(total)
        self.optimizer.step()
        self.control = handler.on_optimizer_step(args, state, self.control)
        rate, by_metric = self._get_learning_rate(), isinstance(self.lr_scheduler, BY_METRIC)
        more = {"epoch": run["epoch"], "evaluated": False}
        self._progress.values.update(learning_rate=rate, done=done, **more)
        if not (accelerator.optimizer_step_was_skipped or by_metric):
            self.lr_scheduler.step()
        model.zero_grad()
        state.global_step += 1
        state.epoch = run["epoch"] + done / run["steps_in_epoch"]

    @property
    def _ends(self) -> bool:
        """Whether the epoch has no further step."""
        run, progress = self._run, self._progress
        over = progress.values["done"] >= run["steps_in_epoch"]
        return over or progress.stopped[:1] == [run["epoch"]]

    def _stop_early(self) -> None:
        if self.control.should_epoch_stop or self.control.should_training_stop:
            self._progress.stopped = [self._run["epoch"], session().position.index]

    # --- what gathers from other ranks, between two steps -----------------------------------------

    def _measure(self) -> list[HeldCall]:
        """Log, evaluate and save what is due, and keep back what may happen only once."""
        self._take_rank()
        handler, progress, history = self.callback_handler, self._progress, self.state.log_history
        gap = progress.values["gaps"]
        if self._history[0] == gap:
            del history[self._history[1] :]  # of an attempt in which a rank was lost
        self._history = gap, len(history)
        self._set_mode()
        held: list[HeldCall] = []
        handler.held, self._gathers = held, True
        try:
            self._log_save_evaluate()
            self._stop_early()
            if self._ends or session().position.over:
                self.control = handler.on_epoch_end(self.args, self.state, self.control)
                self._log_save_evaluate()
                self._stop_early()
                self.control.should_epoch_stop = False
            if self.control.should_training_stop:
                self.store_flos()
                self._share_history()
            progress.values["gaps"] += 1
            return held
        finally:
            handler.held, self._gathers = None, False

    def _set_mode(self) -> None:
        """Let the model be in the mode in which it is here in an undisturbed run. A broken
        evaluation leaves it in the other one: trainers of TRL would log the metrics of that."""
        self.model_wrapped.train(not self._progress.values.get("evaluated"))

    def _log_save_evaluate(self) -> None:
        values = self._progress.values
        values["evaluated"] = values.get("evaluated", False) or self.control.should_evaluate
        run, names = self._run, ("trial", "epoch", "ignore_keys_for_eval", "start_time")
        self._maybe_log_save_evaluate(
            tr_loss=self._tr_loss,
            grad_norm=self._tally.grad_norm,
            model=run["model"],
            learning_rate=self._progress.values["learning_rate"],
            **{name: run[name] for name in names},
        )

    def _publish(self, events: Iterable[HeldCall]) -> None:
        self._unnamed.warn()
        for event, _, more in events:
            if event == "on_save":
                self._complete_checkpoint()
            self.callback_handler.release(event, self.args, self.state, self.control, **more)

    def store_flos(self) -> None:
        """Sum the operations of all ranks, where they can be gathered."""
        if self._gathers and not self._partly:
            super().store_flos()

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        if session().shadowing:
            raise SystemExit(0)  # the rank itself reports
        self._take_rank()
        self._set_mode()
        if self.args.should_save:
            self._remove_former()
        return super()._finalize_training(*args, **named)

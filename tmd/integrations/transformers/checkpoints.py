"""The folders checkpoint-N: each is written by rank 0, and has its name once it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from errno import EEXIST, ENOENT, ENOTEMPTY
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.trainer_utils import rotate_checkpoints

PARTLY = "partly"
"""Folder in ``output_dir`` for a checkpoint-N that is not complete."""
FORMER = "partly-former"
"""Folder in ``output_dir`` for the checkpoint-N of an earlier run, while a new one replaces it."""


class SavingTrainer(transformers.Trainer):
    """Saves like a ``Trainer``, but in a function that may be run again."""

    control: Any
    callback_handler: Any
    _partly = False
    """Whether a checkpoint is being written."""

    def _get_output_dir(self, trial: Any) -> str:
        folder = str(super()._get_output_dir(trial))
        return os.path.join(folder, PARTLY) if self._partly else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """All ranks: rank 0 writes, and the others wait: without a daemon there is no vote."""
        self.store_flos()
        self._share_history()
        state = self.state
        name = f"checkpoint-{state.global_step}"
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = os.path.join(self._get_output_dir(trial), name)
        if self.args.should_save:
            self._write_checkpoint(model, trial, name)
        self.accelerator.wait_for_everyone()

    def _write_checkpoint(self, model: Any, trial: Any, name: str) -> None:
        state, best = self.state, self.state.best_global_step
        self._partly, state.best_global_step = True, None  # else it waits for all ranks
        try:
            folder = self._get_output_dir(trial)
            self._remove_former()
            shutil.rmtree(folder, ignore_errors=True)
            super()._save_checkpoint(model, trial)
        finally:
            self._partly, state.best_global_step = False, best
        state.save_to_json(os.path.join(folder, name, "trainer_state.json"))

    def _complete_checkpoint(self) -> None:
        """After the vote, on all ranks: rank 0 may be gone by now."""
        folder, name = self._get_output_dir(None), f"checkpoint-{self.state.global_step}"
        new, place = os.path.join(folder, PARTLY, name), os.path.join(folder, name)
        former = os.path.join(folder, FORMER)
        is_there = os.path.isdir(place) and os.path.isdir(new)
        if is_there and _move(place, former) and not os.path.isdir(new):
            _move(former, place)  # this was the new one: another rank was faster
        if _move(new, place):
            with contextlib.suppress(OSError):  # others may write there again
                os.rmdir(os.path.join(folder, PARTLY))
        if self.args.should_save:
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(folder, limit, best, use_mtime=True)

    def _remove_former(self) -> None:
        """Rank 0, once all ranks have completed the checkpoint that replaces it."""
        folder = super()._get_output_dir(None)
        shutil.rmtree(os.path.join(folder, FORMER), ignore_errors=True)

    def _share_history(self) -> None:
        """All ranks: a worker that took a rank lacks what was logged before."""
        history, device = self.state.log_history, self.args.device
        counts = self.accelerator.gather(torch.tensor([len(history)], device=device)).tolist()
        if len(set(counts)) == 1:
            return
        # Not a broadcast: a standby that shadows its source has another history, and another size.
        histories: list[Any] = [None] * len(counts)
        dist.all_gather_object(histories, history)
        history[:] = max(histories, key=len)


def _move(place: str, to: str) -> bool:
    """Rename a folder; ``False`` if another rank has done it."""
    try:
        os.replace(place, to)
    except OSError as error:
        if error.errno not in {ENOENT, ENOTEMPTY, EEXIST}:
            raise
        return False
    return True


def refuse_apart(begins: str) -> None:
    """Refuse ranks that begin with different checkpoints. Each worker with a rank calls this.

    ``begins``: what this rank begins with; empty for nothing.

    Raises:
        RuntimeError: they differ.
    """
    if not dist.is_initialized():
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, begins)
    for rank, each in enumerate(found):
        if each != found[0]:
            raise RuntimeError(
                f"rank 0 would begin with {found[0] or 'no checkpoint'}, and rank {rank} with "
                f"{each or 'no checkpoint'}: let all ranks see the same output_dir"
            )

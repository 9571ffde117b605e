"""The arguments of a trainer, and the session that they join."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch.distributed as dist
import transformers

import tmd.trainer
from tmd.trainer import Session


@cache
def session() -> Session:
    """The session of this process. The first call joins the job and makes the process group."""
    if dist.is_initialized():
        raise RuntimeError(
            "the process group exists already: make TrainingArguments of "
            "tmd.integrations.transformers before anything else that uses torch.distributed"
        )
    joined = tmd.trainer.join()
    dist.init_process_group("tmd")
    return joined


def shadowing() -> bool:
    """Whether this process is a standby that runs the steps of a rank."""
    return bool(session.cache_info().currsize) and session().shadowing


@dataclass(repr=False)
class TrainingArguments(transformers.TrainingArguments):
    """As in transformers. Made first in a script: it joins the job of this process."""

    session_checkpoints: str = field(
        default="session",
        metadata={
            "help": "Folder in output_dir for checkpoints from which a job goes on bit for bit. "
            "All ranks must see it. Empty for none."
        },
    )

    def __post_init__(self) -> None:
        session()
        super().__post_init__()
        if self.accelerator_config.dispatch_batches is None:
            self.accelerator_config.dispatch_batches = False

    @property
    def session_folder(self) -> str:
        """The folder of the checkpoints of the session; empty if none are written."""
        if not self.session_checkpoints or self.save_strategy == "no":
            return ""
        return os.path.join(self.output_dir, self.session_checkpoints)

    @property
    def should_save(self) -> bool:
        """Whether this process writes checkpoints; never while it shadows."""
        return bool(super().should_save) and not shadowing()

    @property
    def should_log(self) -> bool:
        """Whether this process logs; never while it shadows."""
        return bool(super().should_log) and not shadowing()


def refuse(args: Any, model: Any) -> None:
    """Refuse what cannot be trained with.

    Raises:
        TypeError: ``args`` are not those of tmd.
        ValueError: they ask for what the trainer does not support.
    """
    if not isinstance(args, TrainingArguments):
        name = type(args).__name__
        raise TypeError(
            f"import {name} from tmd.integrations.transformers or tmd.integrations.trl, too"
        )
    accelerates = args.accelerator_config
    settings = {
        "fsdp": args.fsdp,
        "deepspeed": args.deepspeed,
        # They update parameters in backward(), before the vote.
        f"optim={args.optim.value!r}": args.optim in ("lomo", "adalomo"),
        # Its sums are in the script: an evaluation that is run again would add to them.
        "batch_eval_metrics": args.batch_eval_metrics,
        # It writes from within a step, and each rank decides by itself.
        "enable_jit_checkpoint": getattr(args, "enable_jit_checkpoint", False),
        # It writes to a model that does not move with a rank.
        "sync_ref_model": getattr(args, "sync_ref_model", False),
        # A standby lacks what rank 0 sends before training.
        "precompute_ref_log_probs": getattr(args, "precompute_ref_log_probs", False),
        # It gathers objects only in the first evaluation, which a worker that joins has not had.
        "eval_use_gather_object": args.eval_use_gather_object,
        "auto_find_batch_size": args.auto_find_batch_size,
        "eval_on_start": args.eval_on_start,
        "push_to_hub": args.push_to_hub,
        # A process of each host would write into the same folder.
        "save_on_each_node": args.save_on_each_node,
        "dataloader_persistent_workers": args.dataloader_persistent_workers,
        "accelerator_config.dispatch_batches": accelerates.dispatch_batches,
        "accelerator_config.use_seedable_sampler=False": not accelerates.use_seedable_sampler,
        "train_sampling_strategy='batch_rebalance'": (
            getattr(args, "train_sampling_strategy", "") == "batch_rebalance"
        ),
        "a model that was sharded when it was loaded": (
            getattr(model, "_device_mesh", None) is not None
        ),
    }
    if refused := [name for name, value in settings.items() if value]:
        raise ValueError(f"tmd.integrations.transformers does not support {', '.join(refused)}")

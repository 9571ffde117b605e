"""Rejects settings of torchtitan that tmd does not support."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from torchtitan.components.quantization.utils import has_quantization

from tmd.core.values.checkpoints import step_of

PREFIX = "tmd.integrations.torchtitan does not support"
FOLDERS = "its output folder has the name of a rank, which may move to another host"
LOADING = "load the weights in a subclass, after __init__, unless session.shadowing"
SAVING = {
    "initial_load_path": LOADING,
    "initial_load_in_hf": LOADING,  # without a path it loads from hf_assets_path
    "load_only": "remove it, and checkpoint.enable",
    "create_seed_checkpoint": "make it without tmd",
    "exclude_from_loading": "remove it, since tmd always loads all that is registered",
    "enable_first_step_checkpoint": "remove it, and set checkpoint.interval",
    "last_save_in_hf": "convert the last checkpoint when the job has ended",
}
"""Options of checkpoints -> what to do instead."""


def refuse(config: Any) -> None:
    """Check a configuration of torchtitan.

    Raises:
        ValueError: it has settings that would train incorrectly or that were not tested.
    """
    found = [*_training(config), *_saving(config.checkpoint, config.dump_folder)]
    if found:
        raise ValueError("\n".join(f"{PREFIX} {name}: {remedy}" for name, remedy in found))


def refuse_validator(validator: Any) -> None:
    """Check a validator.

    Raises:
        ValueError: it would keep the data of the rank with which it was built.
    """
    if not hasattr(validator, "dp_rank"):
        raise ValueError(
            f"{PREFIX} {type(validator).__name__}, a validator without 'dp_rank': let it build its "
            "loader from self.dp_rank in validate(), since its worker may hold another rank by then"
        )


def refuse_saved(folder: str) -> None:
    """Check the folder of a job's checkpoints.

    Raises:
        ValueError: it has checkpoints of torchtitan itself, from which the job would not go on.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if own := sorted(n for n in names if re.fullmatch(r"step-\d+", n) and step_of(n) is None):
        raise ValueError(
            f"{PREFIX} to go on from checkpoints of torchtitan itself: {folder} has {own[-1]}. "
            f"Give another checkpoint.folder; to begin with those weights, {LOADING}"
        )


def _training(config: Any) -> Iterator[tuple[str, str]]:
    parallel, training, profiler = config.parallelism, config.training, config.profiler
    if parallel.pipeline_parallel_degree > 1:
        yield (
            "parallelism.pipeline_parallel_degree",
            "its stages differ from rank to rank: use session.build in a loop of your own",
        )
    if parallel.expert_parallel_degree > 1:
        yield "parallelism.expert_parallel_degree", "set it to 1, and FSDP shards the experts"
    if not training.disable_cuda_graphs:
        yield (
            "CUDA graphs",
            "a graph cannot notice that a rank was lost: set training.disable_cuda_graphs=True",
        )
    if training.enable_cpu_offload:
        yield "training.enable_cpu_offload", "remove it"
    for name, is_on in (
        ("parallelism.enable_fsdp_symm_mem", parallel.enable_fsdp_symm_mem),
        ("compile.enable_async_tensor_parallel", config.compile.enable_async_tensor_parallel),
    ):
        if is_on:
            yield name, "its copies bypass the process group: remove it"
    if config.comm.mode != "default":
        yield f"comm.mode={config.comm.mode!r}", "remove it"
    if has_quantization(config.model_spec.model):
        yield "a quantized model (float8, mx, nvfp4)", "remove its converter"
    if config.metrics.save_for_all_ranks:
        yield "metrics.save_for_all_ranks", f"{FOLDERS}: remove it"
    if profiler.enable_profiling or profiler.enable_memory_snapshot:
        yield "the profiler", f"{FOLDERS}: profile without tmd"


def _saving(config: Any, place: str) -> Iterator[tuple[str, str]]:
    if config.enable and "://" in place + config.folder:
        yield "checkpoints in an object store", "mount it on all hosts, and give the path"
    if config.create_seed_checkpoint or config.enable:
        for name, remedy in SAVING.items():
            if getattr(config, name):
                yield f"checkpoint.{name}", remedy
        if config.load_step != -1:
            yield "checkpoint.load_step", "remove it; to resume earlier, delete later checkpoints"

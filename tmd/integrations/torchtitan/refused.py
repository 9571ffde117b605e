"""What of torchtitan cannot run on a session, refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtitan.components.quantization.utils import has_quantization

PREFIX = "tmd.integrations.torchtitan does not support"
LOADING = "load the weights in a subclass, after __init__, unless session.shadowing"
SAVING = {
    "initial_load_path": LOADING,
    "initial_load_in_hf": LOADING,  # without a path it loads from hf_assets_path
    "load_only": "leave checkpoint.enable out",
    "create_seed_checkpoint": "make it without tmd",
    "exclude_from_loading": "all that is registered is loaded",
    "enable_first_step_checkpoint": "leave it out, and give an interval",
    "last_save_in_hf": "convert the last checkpoint when the job has ended",
}
"""Options of checkpoints -> what to do instead."""


def refuse(config: Any) -> None:
    """Refuse by name what would train wrongly or was not tried. Raises ValueError."""
    for name, remedy in (*_training(config), *_saving(config.checkpoint)):
        raise ValueError(f"{PREFIX} {name}: {remedy}")


def _training(config: Any) -> Iterator[tuple[str, str]]:
    parallel, training, profiler = config.parallelism, config.training, config.profiler
    if parallel.pipeline_parallel_degree > 1:
        yield (
            "parallelism.pipeline_parallel_degree",
            "its stages differ from rank to rank: use session.build in a loop of your own",
        )
    if parallel.expert_parallel_degree > 1:
        yield "parallelism.expert_parallel_degree", "give 1, and FSDP divides the experts"
    if not training.disable_cuda_graphs:
        yield (
            "CUDA graphs",
            "a graph does not notice a loss: give training.disable_cuda_graphs=True",
        )
    if training.enable_cpu_offload:
        yield "training.enable_cpu_offload", "leave it out"
    if config.compile.enable_async_tensor_parallel:
        yield "compile.enable_async_tensor_parallel", "its copies bypass the group: leave it out"
    if config.comm.mode != "default":
        yield f"comm.mode={config.comm.mode!r}", "leave it out"
    if has_quantization(config.model_spec.model):
        yield "a quantized model (float8, mx, nvfp4)", "leave its converter out"
    if config.metrics.save_for_all_ranks:
        yield "metrics.save_for_all_ranks", "ranks move, and its folders do not: leave it out"
    if profiler.enable_profiling or profiler.enable_memory_snapshot:
        yield "the profiler", "ranks move, and its folders do not: profile without tmd"


def _saving(config: Any) -> Iterator[tuple[str, str]]:
    if config.create_seed_checkpoint or config.enable:
        for name, remedy in SAVING.items():
            if getattr(config, name):
                yield f"checkpoint.{name}", remedy
        if config.load_step != -1:
            yield "checkpoint.load_step", "remove the later checkpoints"

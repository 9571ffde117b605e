"""Prints what the adapter of torchtitan refuses: the name of each option, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tmd.integrations.torchtitan import protected  # before torchtitan, for the CPU
from tmd.integrations.torchtitan.refused import (
    PREFIX,
    refuse,
    refuse_saved,
    refuse_validator,
)

# isort: split
from torchtitan import trainer
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel


class Other(trainer.Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(trainer.Trainer.Config):
        pass


def check(act: Callable[[Any], object], config: Any) -> None:
    try:
        act(config)
    except ValueError as error:
        print(str(error).removeprefix(PREFIX).strip())
    else:
        print("nothing is refused")


def main() -> None:
    for section, name, value in (
        ("parallelism", "pipeline_parallel_degree", 2),
        ("parallelism", "expert_parallel_degree", 2),
        ("training", "disable_cuda_graphs", False),
        ("training", "enable_cpu_offload", True),
        ("parallelism", "enable_fsdp_symm_mem", True),
        ("compile", "enable_async_tensor_parallel", True),
        ("comm", "mode", "torchcomms"),
        ("metrics", "save_for_all_ranks", True),
        ("profiler", "enable_profiling", True),
        ("checkpoint", "initial_load_path", "/elsewhere"),
        ("checkpoint", "initial_load_in_hf", True),
        ("checkpoint", "enable_first_step_checkpoint", True),
        ("checkpoint", "load_step", 3),
        ("checkpoint", "folder", "gs://bucket/checkpoint"),
    ):
        config = llama3_debugmodel()
        config.training.disable_cuda_graphs = config.checkpoint.enable = True
        refuse(config)
        setattr(getattr(config, section), name, value)
        check(refuse, config)
    Path("own", "step-500").mkdir(parents=True)
    check(refuse_saved, "own")
    check(refuse_validator, object())
    check(protected, Other.Config(model_spec=config.model_spec))
    config = llama3_8b()  # the example of docs/start/torchtitan.md
    config.training.disable_cuda_graphs, config.profiler.enable_profiling = True, False
    check(refuse, config)


if __name__ == "__main__":
    main()

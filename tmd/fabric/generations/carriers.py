"""Makes what :mod:`tmd.core.worker.carrier` has chosen."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

from tmd.core.worker.carrier import (
    Carrier,
    Choice,
    CudaFacts,
    beside_obstacle,
    choose,
    name_of,
)
from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.generations import LIMITS, GenerationLimits, Generations
from tmd.fabric.generations.inner import InnerKind
from tmd.fabric.generations.ring import RingKind

HUNG_CODE = 70
"""Exit code of a worker whose collectives cannot be ended (``EX_SOFTWARE``)."""

log = logging.getLogger("tmd.trainer")


def cuda_facts() -> CudaFacts:
    """What torch finds here. It does not initialise CUDA."""
    return CudaFacts(
        torch.cuda.device_count(), _nccl_version() if dist.is_nccl_available() else None
    )


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def carry(
    fabric: Fabric,
    environment: Mapping[str, str] = os.environ,
    *,
    limits: GenerationLimits = LIMITS,
) -> Choice:
    """Let the chosen inner groups carry the collectives of ``fabric``, before it has groups.

    A group that cannot be ended within ``limits`` ends this process.

    Raises:
        ConfigError: see :func:`choose` and :func:`beside_obstacle`.
    """
    facts = cuda_facts()
    choice, obstacle = choose(environment, facts), beside_obstacle(environment)
    kind = _kind(choice.carrier, fabric)
    if kind is not None:
        name = name_of(choice, facts)
        fabric.pass_to(Generations(kind, carrier=name, limits=limits, on_hung=_end_process))
        if obstacle:
            fabric.generations.beside.never(obstacle)
        log.info("collectives are carried by %s: %s", choice.carrier, choice.reason)
    return choice


def _kind(carrier: Carrier, fabric: Fabric) -> InnerKind | None:
    match carrier:
        case Carrier.NCCL:
            from tmd.fabric.generations.nccl import NcclKind, apply_settings

            apply_settings()
            return NcclKind(fabric)
        case Carrier.RING:
            return RingKind(fabric)
        case Carrier.GLOO:
            # A torch may be built without it.
            from tmd.fabric.generations.gloo import GlooKind

            return GlooKind(fabric)
        case Carrier.OWN:
            return None


def _end_process(hung: tuple[str, ...]) -> None:
    """One loss more is better than a job that waits for this worker."""
    log.critical(
        "the groups %s could not be ended after a loss: this worker ends, and a standby takes its "
        "rank",
        ", ".join(hung),
    )
    sys.stderr.flush()
    os._exit(HUNG_CODE)

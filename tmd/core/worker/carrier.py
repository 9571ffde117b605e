"""Who carries the collectives of this process: decided from the environment and the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from tmd.core.values.errors import ConfigError

CUDA, CPU = "TMD_CUDA", "TMD_CPU"
"""Variables. The first: ``auto``, ``nccl`` or ``staged``. The second: ``own`` or, for tests,
``ring`` or ``gloo``, which override the first."""
BUILD = "TMD_BUILD"
"""Variable: ``beside`` or ``switch``."""
OLDEST = (2, 26, 2)
"""Older versions may hang in an abort (nccl issue 1013, pytorch issue 119797)."""
CRASHING = ((2, 28, 3), (2, 28, 8))
"""First and last version that may crash in an abort."""


class Carrier(StrEnum):
    OWN = "own"
    """tmd's own algorithms; tensors of a GPU are staged through host memory."""
    NCCL = "nccl"
    RING = "ring"
    """tmd's own algorithms, behind generations."""
    GLOO = "gloo"


class Choice(NamedTuple):
    carrier: Carrier
    reason: str


class CudaFacts(NamedTuple):
    """What torch finds on this machine."""

    devices: int
    nccl: tuple[int, ...] | None
    """Version of NCCL; ``None`` if torch was built without, or was not asked."""
    driver: str = ""
    """Version of the GPUs' driver, for people; empty without one, or if nobody has looked."""
    asked: bool = True
    """Whether torch was asked. It takes seconds to import, and finds nothing without a driver."""


def choose(environment: Mapping[str, str], facts: CudaFacts) -> Choice:
    """The carrier of the collectives of this process, and why.

    Raises:
        ConfigError: a variable has an unknown value, or asks for what this machine lacks.
    """
    cuda = _value(environment, CUDA, "auto", ("auto", "nccl", "staged"))
    cpu = _value(environment, CPU, "own", ("own", "ring", "gloo"))
    refusal = _refusal(facts)
    if refusal and cuda == "nccl":
        raise ConfigError(f"{CUDA}=nccl, but {refusal}")
    if cpu != "own":
        return Choice(Carrier(cpu), f"{CPU}={cpu}")
    if cuda == "staged":
        return Choice(Carrier.OWN, f"{CUDA}=staged")
    if refusal:
        return Choice(Carrier.OWN, refusal)
    return Choice(Carrier.NCCL, f"{_gpus(facts)} and {_nccl(facts)}")


def beside_obstacle(environment: Mapping[str, str]) -> str:
    """Why inner groups are never built beside training; empty if they may be.

    Raises:
        ConfigError: the variable has an unknown value.
    """
    build = _value(environment, BUILD, "beside", ("beside", "switch"))
    return "" if build == "beside" else f"{BUILD}={build}"


def name_of(choice: Choice, facts: CudaFacts) -> str:
    """What a worker reports: equal for workers whose collectives fit together. The members of a
    group of NCCL need one version."""
    if choice.carrier is Carrier.NCCL and facts.nccl is not None:
        return f"{choice.carrier} {_shown(facts.nccl)}"
    return str(choice.carrier)


def described(outcome: str, facts: CudaFacts) -> str:
    """``outcome`` of :func:`choose` in words, and what it does not name of this machine."""
    driver = f"driver {facts.driver}" if facts.driver else "no driver"
    rest = [each for each in (_gpus(facts), driver, _nccl(facts)) if each not in outcome]
    return "; ".join(filter(None, (outcome, ", ".join(rest))))


def _gpus(facts: CudaFacts) -> str:
    return {0: "no GPU", 1: "1 GPU"}.get(facts.devices, f"{facts.devices} GPUs")


def _nccl(facts: CudaFacts) -> str:
    if facts.nccl is not None:
        return f"NCCL {_shown(facts.nccl)}"
    return "torch has no NCCL" if facts.asked else "NCCL was not looked for"


def _refusal(facts: CudaFacts) -> str:
    """Why NCCL cannot be used; empty if it can."""
    if facts.devices == 0:
        return "torch finds no GPU"
    if facts.nccl is None:
        return "this build of torch has no NCCL: install one with CUDA"
    shown = _nccl(facts)
    if facts.nccl < OLDEST:
        return f"{shown} may hang when a peer is lost: install {_shown(OLDEST)} or later"
    if CRASHING[0] <= facts.nccl <= CRASHING[1]:
        after = (*CRASHING[1][:2], CRASHING[1][2] + 1)
        return f"{shown} may crash when a peer is lost: install {_shown(after)} or later"
    return ""


def _value(environment: Mapping[str, str], name: str, default: str, known: tuple[str, ...]) -> str:
    value = environment.get(name, "") or default
    if value not in known:
        raise ConfigError(f"{name}={value}: it must be one of {', '.join(known)}")
    return value


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

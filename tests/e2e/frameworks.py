"""The frameworks whose own releases the tests of the adapters use."""

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_map_only

from tests.e2e.conftest import golden_of
from tests.e2e.harness import ROOT, Golden, Run, running
from tmd.embedded import EmbeddedRedis
from tmd.trainer.state.digests import digest_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # TRL would report its use to a server
TITAN = ROOT / ".venv-torchtitan" / "bin" / "python"
"""torchtitan needs older packages than the other frameworks, and so an environment of its own."""


def need(package: str) -> None:
    """Skip the test if ``package`` is missing. Where CI runs, that is a failure."""
    if find_spec(package) is not None:
        return
    _miss(f"{package} is not installed: run make frameworks")


def torchtitan() -> str:
    """The interpreter that has torchtitan; skips as :func:`need` does."""
    if find_spec("torchtitan") is not None:
        return sys.executable
    if not TITAN.exists():
        _miss("torchtitan is not installed: run make torchtitan")
    return str(TITAN)


def contents(
    checkpoints: Path, scratch: Path, *, weights_only: bool = True
) -> dict[str, dict[str, Any]]:
    """By name of its folder, all that a checkpoint in ``checkpoints`` has, read by plain torch; the
    bits of a tensor as their digest. What is not complete cannot be read."""
    found = {}
    for place in checkpoints.iterdir():
        dcp_to_torch_save(place, scratch)
        state = torch.load(scratch, weights_only=weights_only)
        bits = tree_map_only(Tensor, lambda t: (t.dtype, t.shape, digest_of([t])), state)
        found[place.name] = bits
    return found


def undisturbed_in(folder: Path, script: str, *arguments: str) -> tuple[Golden, Path]:
    """Results of a run without faults, and the folder in which it wrote."""
    folder.mkdir(exist_ok=True)
    return golden_of(folder, arguments, script=script), folder / "trace"


@asynccontextmanager
async def after_a_loss(
    folder: Path,
    redis: EmbeddedRedis,
    fault: str,
    script: str,
    arguments: Sequence[str],
    **settings: Any,
) -> AsyncIterator[Run]:
    """A run in which a rank is lost at ``fault``, once that rank has a worker again."""
    async with running(
        folder, redis.url, faults=[f"{fault}=kill"], script=script, arguments=arguments, **settings
    ) as run:
        await run.done("trainer")
        yield run


def _miss(why: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)

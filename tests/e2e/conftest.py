"""Common parts of the fault tests: one Redis, one golden run, and the fork servers."""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.harness import EPOCHS, LONG, RANKS, SCRIPT, Golden, forked, make_golden
from tests.plugins.nvml.driver import script, shim
from tmd import embedded

__all__ = ["script", "shim"]


@pytest.fixture(scope="session", autouse=True)
def fork() -> Iterator[None]:
    """Lets launchers and workers share one import of torch."""
    with forked(compiler=False):
        yield


@pytest.fixture(scope="module")
def compiler() -> Iterator[None]:
    """As ``fork``, with the compiler that FSDP2 needs."""
    with forked(compiler=True):
        yield


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="tmd-") as folder:
        yield Path(folder)


@pytest.fixture
def redis() -> Iterator[embedded.EmbeddedRedis]:
    with embedded.redis() as server:
        yield server


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session")
def long_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """The golden run of a job that is long enough for two joiners, one after the other."""
    return golden_of(tmp_path_factory.mktemp("long_golden"), LONG)


@pytest.fixture(scope="session")
def epochs_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """The golden run of a job of several short epochs."""
    return golden_of(tmp_path_factory.mktemp("epochs_golden"), EPOCHS)


def golden_of(
    folder: Path,
    arguments: Sequence[str] = (),
    ranks: int = len(RANKS),
    script: str = SCRIPT,
    runner: Sequence[str] = (),
) -> Golden:
    # In a thread: asyncio.run here would take the event loop from the tests.
    with ThreadPoolExecutor(1) as pool:
        made = make_golden(folder, arguments, ranks, script, runner)
        return pool.submit(asyncio.run, made).result()

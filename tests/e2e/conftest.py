"""One Redis and one golden run for all fault tests."""

import asyncio
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.forking import fork_server
from tests.e2e.harness import EPOCHS, FORK, LONG, RANKS, SCRIPT, Golden, make_golden
from tmd import embedded


@pytest.fixture(scope="session", autouse=True)
def fork() -> Iterator[None]:
    """Launchers and workers need not import torch each."""
    folder = Path(tempfile.mkdtemp(prefix="tmd-fork-"))  # short: it holds a Unix socket
    with fork_server(folder) as prefix, pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORK, shlex.join(prefix))
        yield
    shutil.rmtree(folder)


@pytest.fixture
def redis() -> Iterator[embedded.EmbeddedRedis]:
    with embedded.redis() as server:
        yield server


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session")
def long_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Of a job with time enough for two joiners, one after the other."""
    return golden_of(tmp_path_factory.mktemp("long_golden"), LONG)


@pytest.fixture(scope="session")
def epochs_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Of a job of several short epochs."""
    return golden_of(tmp_path_factory.mktemp("epochs_golden"), EPOCHS)


def golden_of(
    folder: Path, arguments: Sequence[str] = (), ranks: int = len(RANKS), script: str = SCRIPT
) -> Golden:
    # In a thread: asyncio.run here would take the event loop away from the tests.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, make_golden(folder, arguments, ranks, script)).result()

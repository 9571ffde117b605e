"""One Redis and one golden run for all fault tests."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.harness import Golden, make_golden
from tmd import embedded


@pytest.fixture
def redis() -> Iterator[embedded.EmbeddedRedis]:
    with embedded.redis() as server:
        yield server


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    folder: Path = tmp_path_factory.mktemp("golden")
    # In a thread: asyncio.run here would take the event loop away from the tests.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, make_golden(folder)).result()

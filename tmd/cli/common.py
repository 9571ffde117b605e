"""Shared by several verbs: the configuration option and the connection to the cluster's store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tmd.cli.output import say

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.values.model import ClusterView
    from tmd.daemon.store import RedisStore

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="Configuration file [default: $TMD_CONFIG or /etc/tmd/tmd.toml]."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Output for programs.")]

RETRY_S = 0.2

T = TypeVar("T")


def with_store(config: Path | None, work: Callable[[RedisStore, Settings], Awaitable[T]]) -> T:
    """Run ``work`` with a connection to the configured cluster.

    Raises:
        ConfigError: no usable Redis, or no secret, is configured.
        StoreUnavailable: Redis does not answer.
    """
    from tmd.config import load
    from tmd.daemon.store import open_store

    log_to_stderr()
    settings = load(config)

    async def run() -> T:
        store = open_store(settings)
        try:
            return await work(store, settings)
        finally:
            await store.close()

    return asyncio.run(run())


def log_to_stderr() -> None:
    """Programs parse what a verb prints on stdout."""
    from tmd.config import Log
    from tmd.daemon import logs

    logs.configure(Log(level="warning"))


async def snapshot_when_back(store: RedisStore, printed: set[str]) -> ClusterView:
    """The next available view: requests are still carried out while Redis is unavailable, so a
    waiting verb keeps waiting."""
    from tmd.core.values.errors import StoreUnavailable

    while True:
        try:
            return await store.snapshot()
        except StoreUnavailable as error:
            say_once(f"{error}; trying again", printed)
        await asyncio.sleep(RETRY_S)


def say_once(line: str, printed: set[str]) -> None:
    """Print ``line`` on stderr unless it is in ``printed``."""
    if line not in printed:
        printed.add(line)
        say(line, err=True)


def user() -> str:
    """The requester, for the records; empty if the system has no name for the user."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def check_folder(option: str, file: Path) -> None:
    """Raises ConfigError: ``file``, the value of ``option``, cannot be written there."""
    import os

    from tmd.core.values.errors import ConfigError

    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {folder}")
    if file.is_dir():
        raise ConfigError(f"{option} {file}: this is a folder; give the name of a file")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {file}: you may not write to {folder}")

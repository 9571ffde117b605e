"""What several verbs need: the configuration option and a connection to the cluster's store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.daemon.store import RedisStore

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="Configuration file [default: $TMD_CONFIG or /etc/tmd/tmd.toml]."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Output for programs.")]

T = TypeVar("T")


def with_store(config: Path | None, work: Callable[[RedisStore, Settings], Awaitable[T]]) -> T:
    """Run ``work`` with a connection to the configured cluster.

    Raises:
        ConfigError: no usable Redis, or no secret, is configured.
        StoreUnavailable: it does not answer.
    """
    from tmd.config import load
    from tmd.daemon.store import open_store

    settings = load(config)

    async def run() -> T:
        store = open_store(settings)
        try:
            return await work(store, settings)
        finally:
            await store.close()

    return asyncio.run(run())


def print_json(value: Any) -> None:
    """What ``--json`` prints, indented."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def user() -> str:
    """Who asks, for the records; empty if the system does not know."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""

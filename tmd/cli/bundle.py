"""What a support engineer asks for, in one file: ``tmd doctor --bundle``.

Known secrets, and text that looks like a secret, are masked.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tmd import __version__
from tmd.cli.scrubbing import scrubbed, scrubbed_value, secrets_of
from tmd.core.values.errors import ConfigError, TmdError
from tmd.core.values.reasons import in_words, os_reason

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.daemon.store import RedisStore

LONGEST = 4_000_000
"""Characters of one text; of a longer one the end is kept."""
ALERTS = 1000
COMMAND_S = 20.0
COMMANDS: dict[str, tuple[str, ...]] = {
    "journal.txt": ("journalctl", "-u", "tmd", "-n", "5000", "--no-pager", "-o", "short-iso"),
    "kernel.txt": ("journalctl", "-k", "-n", "3000", "--no-pager", "-o", "short-iso"),
    "unit.txt": ("systemctl", "cat", "tmd", "--no-pager"),
    "service.txt": ("systemctl", "status", "tmd", "--no-pager", "--lines", "0"),
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "addresses.txt": ("ip", "-brief", "address"),
    "disks.txt": ("df", "-h"),
}
"""File in the bundle -> the command whose output it holds."""


def write(file: Path, settings: Settings, points: Sequence[Any]) -> list[str]:
    """Write the bundle, readable by its owner alone; return the names of its texts.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    secrets = secrets_of(settings)
    names = []
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        raise ConfigError(f"--bundle {file}: {os_reason(error)}; name another file") from None
    try:
        with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, make in sources(settings, points):
                _add(archive, name, _made(make, secrets))
                names.append(name)
    except BaseException as error:
        file.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"--bundle {file}: {os_reason(error)}; nothing is left of it, name a place with room"
        ) from None
    return names


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    body = text.encode(errors="backslashreplace")
    entry = tarfile.TarInfo(f"tmd-bundle/{name}")
    entry.size, entry.mtime, entry.mode = len(body), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(body))


def sources(settings: Settings, points: Sequence[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and source of each file: a text, or a value that is written as JSON."""
    yield "about.json", _about
    yield "doctor.json", lambda: points
    yield "configuration.toml", lambda: _configuration(settings)
    yield "state.json", lambda: _asked(settings, _state)
    yield "alerts.json", lambda: _asked(settings, _alerts)
    yield "metrics.txt", lambda: _metrics(settings)
    for name, command in COMMANDS.items():
        yield name, partial(_output, command)


def _text(made: Any, secrets: frozenset[str]) -> str:
    """What is written of ``made``, without secrets."""
    import msgspec

    if isinstance(made, str):
        # Cut afterwards: the rest of a secret that was cut in two would not be recognised.
        return scrubbed(made, secrets)[-LONGEST:]
    value = scrubbed_value(msgspec.to_builtins(made), secrets)
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def _made(make: Callable[[], Any], secrets: frozenset[str]) -> str:
    """The text, or why there is none: one that fails must not cost the others."""
    try:
        return _text(make(), secrets)
    except (TmdError, OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
        return _text(f"cannot be had: {in_words(error)}\n", secrets)


def _about() -> dict[str, Any]:
    from importlib.metadata import distributions

    return {
        "tmd": __version__,
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "user": os.getuid(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "variables": sorted(name for name in os.environ if name.startswith("TMD_")),
        "packages": sorted({f"{d.name} {d.version}" for d in distributions()}),
    }


def _configuration(settings: Settings) -> str:
    from tmd.cli.inspecting import toml_of

    return "\n".join(line for _, line in toml_of(settings)) + "\n"


def _asked(settings: Settings, ask: Callable[[RedisStore], Any]) -> Any:
    import asyncio

    from tmd.daemon.store import open_store

    store = open_store(settings)

    async def run() -> Any:
        try:
            return await ask(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def _state(store: RedisStore) -> Any:
    from tmd.daemon.bus import state_of

    return await state_of(store)


async def _alerts(store: RedisStore) -> Any:
    """The newest alerts, oldest first."""
    newest: deque[Any] = deque(maxlen=ALERTS)
    cursor = ""
    while found := await store.alerts(cursor, limit=ALERTS):
        newest.extend(alert for _, alert in found)
        cursor = found[-1][0]
    return list(newest)


def _metrics(settings: Settings) -> str:
    from urllib.request import ProxyHandler, build_opener

    if settings.http.address is None:
        return "off: [http] listen names no port\n"
    host, port = settings.http.address
    host = f"[{host}]" if ":" in host else host
    place = "127.0.0.1" if host in ("0.0.0.0", "[::]", "") else host
    direct = build_opener(ProxyHandler({}))
    with direct.open(f"http://{place}:{port}/metrics", timeout=COMMAND_S) as response:
        return str(response.read().decode())


def _output(command: Sequence[str]) -> str:
    program = shutil.which(command[0])
    if program is None:
        return f"{command[0]} is not installed here\n"
    done = subprocess.run(
        [program, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=COMMAND_S,
        errors="backslashreplace",
    )
    return f"$ {' '.join(command)}  (exit status {done.returncode})\n{done.stdout}"

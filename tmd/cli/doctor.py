"""The verb doctor: what this host can do and observe, and how to fix the rest."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from tmd.cli.common import ConfigOption, JsonOption, log_to_stderr
from tmd.cli.output import print_json, say
from tmd.core.values.errors import ConfigError, PluginError, StoreUnavailable
from tmd.core.values.reasons import in_words
from tmd.folders import peer_of

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.core.values.model import ClusterView
    from tmd.core.worker.carrier import CudaFacts

ANSWER_S = 1.0
"""Longest wait for a daemon to accept a connection."""
CLOCK_S = 1.0
"""Above this difference to the clock of Redis displayed times cannot be compared: a finding has the
time of its host, 'tmd resume' that of Redis."""


class Point(Struct, frozen=True):
    """One check and its result."""

    name: str
    ok: bool
    needed: bool
    """The daemon does not work without it; otherwise it only observes less."""
    text: str


BundleOption = Annotated[
    Path | None,
    typer.Option(help="Also write what a support engineer asks for into this file (.tar.gz)."),
]


def doctor(
    config: ConfigOption = None, as_json: JsonOption = False, bundle: BundleOption = None
) -> None:
    """Report what this host can do and observe. FAIL: the daemon cannot work; warn: it works, but
    does or observes less. Exit status 1 if something fails."""
    from tmd.config import find_file, load

    log_to_stderr()
    settings = load(config)
    points = [_exposure(find_file(config)), *examine(settings)]
    if as_json:
        print_json(points)
    else:
        for point in points:
            mark = "ok  " if point.ok else "FAIL" if point.needed else "warn"
            say(f"{mark}  {point.name:<20}  {point.text}".rstrip())
    if bundle is not None:
        from tmd.cli import bundle as bundles

        names = bundles.write(bundle, settings, points)
        say(f"wrote {bundle}, secrets removed; it contains {', '.join(names)}", err=True)
    if any(point.needed and not point.ok for point in points):
        raise typer.Exit(1)


def examine(settings: Settings) -> Iterator[Point]:
    """All checks, in the order in which to fix them."""
    yield _secret(settings)
    yield from _redis(settings)
    other = _other_user(settings.host.socket)
    yield _folder("socket folder", settings.host.socket.parent, other)
    yield _folder("state folder", settings.host.state_dir, other)
    yield _ports(settings.host.advertise)
    yield _collectives()
    yield from _detectors(settings, other)


def _exposure(file: Path | None) -> Point:
    from tmd.config import DEFAULT_FILE, refuse_exposed

    try:
        refuse_exposed(file)
    except ConfigError as error:
        return Point("configuration", False, True, str(error))
    nowhere = f"the environment alone, since there is no {DEFAULT_FILE}"
    return Point("configuration", True, True, str(file or nowhere))


def _secret(settings: Settings) -> Point:
    try:
        settings.secret()
    except ConfigError as error:
        return Point("secret", False, True, str(error))
    return Point("secret", True, True, "readable")


def _redis(settings: Settings) -> Iterator[Point]:
    import asyncio

    from tmd.daemon.store import open_store

    try:
        store = open_store(settings)
    except ConfigError as error:
        yield Point("redis", False, True, str(error))
        return

    async def ask() -> tuple[float, ClusterView]:
        try:
            ahead = await store.clock() - time.time()
            await store.probe()
            return ahead, await store.snapshot()
        finally:
            await store.close()

    try:
        ahead, view = asyncio.run(ask())
    except StoreUnavailable as error:
        yield Point("redis", False, True, str(error))
        return
    yield Point("redis", True, True, "answers reads and writes")
    # Without this host, whose status is sealed with this very secret: it verifies in any case.
    others = [h for h in view.hosts if h.host != settings.host.name]
    yield _same_secret(store.forged_kinds, elsewhere=bool(others or view.jobs))
    near = abs(ahead) < CLOCK_S
    service = "run a time service (chrony, systemd-timesyncd) on this host and on that of Redis"
    remedy = "" if near else f": {service}"
    yield Point("clock", near, False, f"{abs(ahead):.3f} s from that of Redis{remedy}")


def _same_secret(forged: list[str], *, elsewhere: bool) -> Point:
    """Whether the values that members of the cluster wrote match the secret of this host.

    ``elsewhere``: values of other hosts do, so the wrong secret is on another host.
    """
    if not forged:
        return Point("shared secret", True, True, "verifies what is in Redis")
    kinds = ", ".join(forged)
    if elsewhere:
        text = (
            f"verifies only some values in Redis, not all ({kinds}): compare [cluster] secret_file "
            "on the hosts that 'tmd status' does not show"
        )
        return Point("shared secret", False, False, text)
    text = (
        f"does not verify values in Redis ({kinds}): compare [cluster] secret_file with that of "
        "the other hosts"
    )
    return Point("shared secret", False, True, text)


def _other_user(path: Path) -> int | None:
    """The user, by number, of the daemon that listens at ``path``, whose rights may differ from
    those of this process; ``None`` if it is the same user, or if there is no daemon."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
        except OSError:
            return None
        _, uid = peer_of(connection)
        return None if uid == os.geteuid() else uid


def _folder(name: str, folder: Path, other: int | None) -> Point:
    """Whether the daemon could create and use ``folder`` as this user, or runs as the ``other``."""
    if other is not None:
        return Point(name, True, True, f"{folder}; in use by the running daemon, of user {other}")
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not os.path.isdir(place):
        text = f"{place} is not a folder: remove it, or set [host] runtime_dir, socket or state_dir"
        return Point(name, False, True, text)
    if not os.access(place, os.W_OK | os.X_OK):
        who = f"user {os.getuid()}"
        text = f"{who} may not write to {place}: run as the daemon's user, or correct its owner"
        return Point(name, False, True, text)
    made = "" if place == folder else ", which the daemon creates"
    return Point(name, True, True, f"{folder}{made}")


def _ports(address: str) -> Point:
    """Workers listen on ports that the kernel chooses, at the advertised address."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as listener:
            listener.bind(where)
            listener.listen(1)
    except (OSError, UnicodeError) as error:
        remedy = "set [host] advertise to an address of this host"
        text = f"cannot listen on {address}: {in_words(error)}; {remedy}"
        return Point("ports", False, True, text)
    if address.startswith("127.") or address == "::1":
        text = f"{address} is reachable from this host only; set [host] advertise"
        return Point("ports", False, False, text)
    return Point("ports", True, True, f"workers can listen on {address}")


def _collectives() -> Point:
    """Who would carry the collectives of GPU tensors in a worker with this environment."""
    name = "collectives"
    if find_spec("torch") is None:
        remedy = "run 'tmd doctor' where the training scripts run"
        return Point(name, True, False, f"torch is not installed in this environment: {remedy}")
    from tmd.core.worker.carrier import choose, described

    facts = _cuda_facts()
    try:
        choice = choose(os.environ, facts)
    except ConfigError as error:
        return Point(name, False, False, described(str(error), facts))
    return Point(name, True, False, described(f"{choice.carrier}: {choice.reason}", facts))


def _cuda_facts() -> CudaFacts:
    """The GPUs and NCCL that torch sees, and the version of the driver. torch is asked only where a
    driver of GPUs is installed."""
    from tmd.core.worker.carrier import CudaFacts

    amd = os.path.exists("/dev/kfd")
    driver = driver_version() or ("amdgpu" if amd else "")
    if not (_can_load("libcuda.so.1") or amd):
        return CudaFacts(devices=0, nccl=None, driver=driver, asked=False)
    from tmd.fabric.generations.carriers import cuda_facts

    return cuda_facts()._replace(driver=driver or "of unknown version")


def driver_version() -> str:
    """The version of NVIDIA's driver, as NVML reports it; empty if it does not."""
    try:
        import pynvml as nvml
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ""


def _can_load(library: str) -> bool:
    import ctypes

    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _detectors(settings: Settings, other: int | None) -> Iterator[Point]:
    """``other``: the user of the daemon, if it is another one."""
    from tmd.daemon.plugins import load_detectors

    try:
        detectors = load_detectors(settings)
    except (ConfigError, PluginError) as error:
        yield Point("detectors", False, True, str(error))
        return
    for found in detectors:
        try:
            why_not = found.why_not()
            sources = "" if why_not else found.sources()
        except PluginError as error:
            yield Point(f"detector {found.origin.name}", False, False, in_words(error))
            continue
        text = why_not or f"works here ({found.strategy.value}){sources and ': '}{sources}"
        if other is not None:
            text += f"; checked as user {os.geteuid()}, and the daemon runs as user {other}"
        yield Point(f"detector {found.origin.name}", why_not is None, False, text)

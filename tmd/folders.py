"""Folders that the daemon and its clients use unless the configuration names others.

A user without XDG_RUNTIME_DIR has a folder below ``/tmp``, where every user of the host may create
one of that name. Whoever did could pose as the user's daemon, so a foreign one is never used.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

from tmd.schema import Invalid

SERVICE_DIR, SOCKET = Path("/run/tmd"), "tmd.sock"
"""Folder and name of the socket of the service."""
TEMPORARY = Path("/tmp")
_UCRED = struct.Struct("3i")


def default_dir(variable: str) -> Path:
    """The folder given by systemd; else the usual one of root or of the user.

    Raises:
        Invalid: the user's folder below ``/tmp`` belongs to somebody else.
    """
    if os.environ.get(variable):
        return Path(os.environ[variable].split(":")[0])
    runtime = variable == "RUNTIME_DIRECTORY"
    if os.geteuid() == 0:
        return SERVICE_DIR if runtime else Path("/var/lib/tmd")
    if runtime:
        given = os.environ.get("XDG_RUNTIME_DIR")
        own = Path(given or user_folder(TEMPORARY)) / "tmd"
        return runtime_dir_of_user(own, SERVICE_DIR)
    return Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local/state")) / "tmd"


def runtime_dir_of_user(own: Path, service: Path) -> Path:
    """Where a user finds a daemon: in ``own`` if one is there, else in ``service`` if one is there.
    Without any it is ``own``, where a daemon of the user would be.

    Raises:
        Invalid: ``own`` lies in a foreign folder below ``/tmp``, and none is in ``service``.
    """
    wrong = foreign(own)
    is_elsewhere = (service / SOCKET).exists() and (bool(wrong) or not (own / SOCKET).exists())
    if wrong and not is_elsewhere:
        raise Invalid(wrong)
    return service if is_elsewhere else own


def user_folder(temporary: Path) -> Path:
    """The folder of this user below ``temporary``."""
    return temporary / f"tmd-{os.geteuid()}"


def foreign(place: Path) -> str:
    """Why ``place`` must not be used: it lies in this user's folder below ``/tmp``, and somebody
    else made that or can change it. Empty if it may be used."""
    folder = user_folder(TEMPORARY)
    if not place.is_relative_to(folder):
        return ""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return ""
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if own and not found.st_mode & 0o022:
        return ""
    return (
        f"{folder} is not a folder that only this user can change: "
        "set XDG_RUNTIME_DIR, or [host] runtime_dir"
    )


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as the kernel reports them."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(peer)
    return pid, uid


def refuse_impostor(connection: socket.socket, path: Path) -> None:
    """Check a connection to the socket at ``path``, if that lies in this user's folder below
    ``/tmp``: somebody else may have made that since :func:`default_dir` was called.

    Raises:
        PermissionError: neither root nor this user is at the other end.
    """
    if not path.is_relative_to(user_folder(TEMPORARY)):
        return
    _, uid = peer_of(connection)
    if uid not in (0, os.geteuid()):
        raise PermissionError(f"user {uid} poses as the daemon at {path}")

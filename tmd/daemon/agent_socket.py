"""The Unix socket of a host: how it is made, and the users that may connect."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from tmd.core.values.errors import ConfigError
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.reasons import os_reason
from tmd.daemon.fd_passing import AgentListener
from tmd.folders import foreign

HELLO_S = 5.0
"""A client without a complete hello after this long is disconnected."""
STRANGERS = 256
"""Most clients without a complete hello. Beyond it, the one that has waited longest is
disconnected."""


class AgentSocket(Struct, frozen=True):
    """Path of the socket, and the users that may connect."""

    path: Path
    host: str
    uids: frozenset[int]
    """User ids that may connect."""
    key_of: Callable[[str], bytes]
    """Returns the key for a job's links."""
    shadow: ShadowLimits = ShadowLimits()
    hello_s: float = HELLO_S
    strangers: int = STRANGERS


def uids_of(users: tuple[str, ...]) -> frozenset[int]:
    """Root, the daemon's own user, and ``users`` by name or number.

    Raises:
        ConfigError: one of ``users`` does not exist.
    """
    found = {0, os.geteuid()}
    for user in users:
        try:
            found.add(int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise ConfigError(f"[host] users: there is no user '{user}' on this host") from None
    return frozenset(found)


def bind(path: Path, uids: frozenset[int]) -> AgentListener:
    """A listening socket at ``path``. A socket left by a dead daemon is replaced."""
    listener = AgentListener(uids)
    try:
        _make_way(path.parent)
        if wrong := foreign(path):
            raise ConfigError(f"[host] socket {path}: {wrong}")
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise ConfigError(f"another daemon is serving {path}: stop it first")
            path.unlink()
        listener.bind(str(path))
        # The user id decides who may use it. Root and the daemon's user need no file permission.
        path.chmod(0o666 if uids - {0, os.geteuid()} else 0o600)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"[host] socket {path}: {os_reason(error)}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _make_way(folder: Path) -> None:
    """Create ``folder``. All users may traverse the new folders, whatever the umask."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        place.chmod(0o755)

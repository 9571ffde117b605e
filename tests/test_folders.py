"""The folder of a user below /tmp, where anybody may create one of that name."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from tmd.core.values.errors import ConfigError, TmdError
from tmd.daemon.agent_socket import bind, uids_of
from tmd.folders import (
    SOCKET,
    TEMPORARY,
    foreign,
    refuse_impostor,
    runtime_dir_of_user,
    user_folder,
)
from tmd.launcher import Launcher, LaunchSpec
from tmd.schema import Invalid
from tmd.testing.clients import worker_status
from tmd.trainer.worker.agent import Agent

ATTACKER = 65532
USER = 200_000 + os.getpid() % 100_000
"""One of this test process, as the folder has a fixed name."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user: run the tests as root")


@contextmanager
def acting_as(user):
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def folder():
    """The folder of USER, which does not exist yet."""
    with acting_as(USER):
        path = user_folder(TEMPORARY)
    try:
        yield path
    finally:
        if path.is_symlink():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def service():
    """The folder of the service, which all users can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="tmd-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def made(folder, user, mode):
    (folder / "tmd").mkdir(parents=True)
    (folder / "tmd").chmod(0o755)  # whatever the umask of this process is
    folder.chmod(mode)
    for path in (folder, folder / "tmd"):
        os.chown(path, user, user)


def linked(folder, target):
    folder.symlink_to(target)
    os.lchown(folder, USER, USER)


CASES = [
    (lambda folder, _: None, False),
    (lambda folder, _: made(folder, USER, 0o755), False),
    (lambda folder, _: made(folder, USER, 0o700), False),
    (lambda folder, _: made(folder, USER, 0o777), True),
    (lambda folder, _: made(folder, USER, 0o775), True),
    (lambda folder, _: made(folder, ATTACKER, 0o755), True),
    (lambda folder, service: linked(folder, service), True),
]
IDS = ["none", "own", "private", "open", "group", "foreign", "link"]


@pytest.mark.parametrize(("make", "refused"), CASES, ids=IDS)
def test_a_foreign_folder_is_not_taken_for_that_of_the_user(folder, service, make, refused):
    make(folder, service)
    with acting_as(USER):
        assert bool(foreign(folder / "tmd" / SOCKET)) == refused
        if refused:
            with pytest.raises(Invalid, match="set XDG_RUNTIME_DIR"):
                runtime_dir_of_user(folder / "tmd", service)
        else:
            assert runtime_dir_of_user(folder / "tmd", service) == folder / "tmd"


def test_the_service_is_preferred_to_a_foreign_folder(folder, service):
    made(folder, ATTACKER, 0o755)
    (folder / "tmd" / SOCKET).touch()
    (service / SOCKET).touch()
    with acting_as(USER):
        assert runtime_dir_of_user(folder / "tmd", service) == service


def test_a_daemon_serves_in_no_foreign_folder(folder):
    made(folder, ATTACKER, 0o777)
    (folder / "tmd").chmod(0o777)
    with acting_as(USER), pytest.raises(ConfigError, match="only this user can change"):
        bind(folder / "tmd" / SOCKET, uids_of(())).close()


def test_a_daemon_of_the_user_serves_where_its_clients_look(folder, service):
    with acting_as(USER), bind(folder / "tmd" / SOCKET, uids_of(())):
        assert runtime_dir_of_user(folder / "tmd", service) == folder / "tmd"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "tmd" / SOCKET))
            refuse_impostor(client, folder / "tmd" / SOCKET)


@pytest.fixture
def impostor(folder):
    """A server of somebody else, who made the folder after its user had learned the path."""
    made(folder, ATTACKER, 0o755)
    path = folder / "tmd" / SOCKET
    with socket.socket(socket.AF_UNIX) as server:
        with acting_as(ATTACKER):
            server.bind(str(path))
            path.chmod(0o777)
            server.listen()
        server.settimeout(5)
        yield server, path


def heard(server):
    connection, _ = server.accept()
    with connection:
        return connection.recv(100)


def test_a_worker_tells_an_impostor_nothing(impostor):
    server, path = impostor
    with acting_as(USER), pytest.raises(TmdError, match=f"user {ATTACKER} poses"):
        Agent(path, lambda: worker_status("h1/job/0.a"), lambda _: None).introduce(0)

    assert heard(server) == b""


def test_a_launcher_tells_an_impostor_nothing(impostor):
    server, path = impostor
    with acting_as(USER):
        status = Launcher(LaunchSpec("job", "h1", path, "127.0.0.1", 1, 1, ("/bin/true",), 0)).run()

    assert status == 0
    assert heard(server) == b""

"""The image of the daemon, built by buildah, and a daemon that runs in it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.marks import program
from tests.packaged.debian import bootstrapped, needs_root
from tests.packaged.images import Images

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
BASE = "docker.io/library/python:3.13-slim"
PULL_S = 60
USER = 7471
"""Of the image, by number."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """The image ``tmd``. Where no registry answers, a Debian with Python stands in for its base."""
    needs_root()
    program("buildah", "buildah")
    folder = tmp_path_factory.mktemp("images")
    images = Images(folder)
    try:
        images.do("pull", BASE, seconds=PULL_S)
    except (subprocess.SubprocessError, OSError):
        root = bootstrapped(folder / "base")
        (root / "usr/bin/python").symlink_to("python3")
        images.image_of(root, BASE)
    images.build("Containerfile", "tmd", folder)
    return images


@pytest.fixture
def container(images: Images) -> Iterator[str]:
    name = images.do("from", "--pull-never", "tmd")
    yield name
    images.do("rm", name)


def test_the_image_holds_the_daemon_and_no_torch(images: Images, container: str) -> None:
    """It runs as a user without rights, whose numbers are those of the documentation."""
    python = ("/opt/tmd/bin/python", "-c")
    find = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('pip'))"

    assert images.do("run", container, "--", "id", "-u") == str(USER)
    assert images.do("run", container, "--", "id", "-g") == str(USER)
    assert images.do("run", container, "--", "tmd", "--version").startswith("tmd ")
    assert images.do("run", container, "--", *python, find) == "None None"


def test_a_daemon_in_the_image_serves_until_it_is_stopped(
    images: Images, container: str, redis_url: str, tmp_path: Path
) -> None:
    """With what ``tmd config init`` writes, a Redis, and a secret that only its user can read."""
    socket = Path(redis_url.removeprefix("unix://"))
    socket.chmod(0o777)
    socket.parent.chmod(0o755)
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "secret").write_text("s" * 48)
    (etc / "tmd.toml").write_text(
        '[cluster]\nname = "image"\nsecret_file = "/etc/tmd/secret"\n'
        f'[redis]\nurl = "unix:///redis/{socket.name}"\n[host]\nname = "inside"\n'
    )
    for path in (etc, etc / "secret"):
        os.chown(path, USER, USER)
    (etc / "secret").chmod(0o600)
    mounts = ["--volume", f"{etc}:/etc/tmd:ro", "--volume", f"{socket.parent}:/redis"]
    inside = ["run", *mounts, container, "--"]
    daemon = images.start(*inside, "/opt/tmd/bin/tmd-daemon")
    try:
        shown = answer(images, inside, daemon)
    finally:
        stop()
        status = daemon.wait(60)

    assert '"inside"' in shown
    assert status == 0


def stop() -> None:
    """Send SIGTERM to the daemon itself. Without a runtime, its process is one of this machine."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[:2] == [b"/opt/tmd/bin/python", b"/opt/tmd/bin/tmd-daemon"]:
                os.kill(int(process.name), signal.SIGTERM)


def answer(images: Images, inside: list[str], daemon: subprocess.Popen[bytes]) -> str:
    """What ``tmd status`` says once the daemon has written its status."""
    deadline = time.monotonic() + 60
    shown = ""
    while '"inside"' not in shown:
        assert daemon.poll() is None, "the daemon ended"
        assert time.monotonic() < deadline, shown
        try:
            shown = images.do(*inside, "tmd", "status", "--json")
        except subprocess.CalledProcessError as error:
            shown = error.stderr
    return shown

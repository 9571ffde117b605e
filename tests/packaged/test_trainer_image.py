"""The base for images that train: tmd beside the torch of an image, and a job in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.marks import program
from tests.packaged.debian import bootstrapped, needs_root
from tests.packaged.images import ROOT, Images
from tmd.demo.report import read_trace

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
BASE = "localhost/with-torch"
USER = 7472
"""Of the image, by number."""
SMALL = ("--steps", "5", "--width", "32", "--depth", "1", "--heads", "2", "--context", "16")
WITHIN_S = 60.0


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """The distribution of that name as it is installed here, and all that it needs."""
    if name in found:
        return found
    found[name] = distribution(name)
    for text in found[name].requires or ():
        part = Requirement(text)
        if part.marker is None or part.marker.evaluate({"extra": ""}):
            needed(part.name, found)
    return found


def with_torch(root: Path) -> Path:
    """Give the Debian in ``root`` the torch of these tests: there is no image with torch here."""
    inside = root / "usr/local/lib/python{}.{}/dist-packages".format(*sys.version_info)
    if not (root / "usr/bin/python{}.{}".format(*sys.version_info)).exists():
        pytest.skip("the torch of these tests is for another Python than that of Debian")
    try:
        parts = needed("torch", {})
    except PackageNotFoundError as error:
        pytest.skip(f"torch is not installed whole: {error}")
    for part in parts.values():
        for file in part.files or ():
            if ".." not in file.parts:
                (inside / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(part.locate_file(file)), inside / file)
    # Images with torch let pip install beside it, as a rule.
    for note in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        note.unlink()
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """The image ``trainer``, on a Debian with torch."""
    needs_root()
    program("buildah", "buildah")
    folder = tmp_path_factory.mktemp("trainer")
    images = Images(folder)
    images.image_of(with_torch(bootstrapped(folder / "base")), BASE)
    shutil.rmtree(folder / "base")
    images.build("Containerfile.trainer", "trainer", folder, "--build-arg", f"BASE={BASE}")
    return images


@pytest.fixture
def container(images: Images) -> Iterator[str]:
    name = images.do("from", "--pull-never", "trainer")
    yield name
    images.do("rm", name)


def test_the_torch_of_the_image_stays_as_it_is(images: Images, container: str) -> None:
    """And a user without rights runs what trains."""
    ask = "import torch, tmd.trainer; print(torch.__version__)"

    assert images.do("run", container, "--", "id", "-u") == str(USER)
    assert images.do("run", container, "--", "python3", "-c", ask) == distribution("torch").version


def test_a_job_in_the_image_trains_with_the_daemon_of_its_host(
    images: Images, container: str, redis_url: str, tmp_path: Path
) -> None:
    """With the mounts that the container file names."""
    run, out, etc = (tmp_path / name for name in ("run", "out", "etc"))
    for folder in (run, out, etc):
        folder.mkdir()
    os.chown(out, USER, USER)
    (etc / "secret").touch(mode=0o600)
    (etc / "secret").write_text("s" * 48)
    (etc / "tmd.toml").write_text(
        f'[cluster]\nname = "trainer"\nsecret_file = "{etc}/secret"\n[redis]\nurl = "{redis_url}"\n'
        f'[host]\nname = "inside"\nadvertise = "127.0.0.1"\nusers = ["{USER}"]\n'
    )
    own = {"TMD_HOST__RUNTIME_DIR": str(run), "TMD_HOST__STATE_DIR": str(tmp_path / "state")}
    command = (sys.executable, "-P", "-m", "tmd.daemon", "-c", str(etc / "tmd.toml"))
    places = {run: "/run/tmd", etc / "tmd.toml": "/etc/tmd/tmd.toml", out: "/out"}
    places[ROOT / "tmd" / "demo" / "train.py"] = "/home/trainer/train.py"
    mounts = [word for here, there in places.items() for word in ("--volume", f"{here}:{there}")]
    launch = (
        "tmd",
        "launch",
        "--job",
        "gpt",
        "--nnodes",
        "1",
        "--max-restarts",
        "0",
        "--trace",
        "/out",
    )
    with subprocess.Popen(command, env={**os.environ, **own}) as daemon:
        try:
            await_socket(run, daemon)
            images.do("run", *mounts, container, "--", *launch, "--", "train.py", *SMALL)
        finally:
            daemon.terminate()

    assert sorted(read_trace(out).commits) == [(0, step) for step in range(5)]


def await_socket(folder: Path, daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not (folder / "tmd.sock").exists():
        assert daemon.poll() is None, "the daemon ended"
        assert time.monotonic() < deadline, "the daemon does not listen"
        time.sleep(0.05)

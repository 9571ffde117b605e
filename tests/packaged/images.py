"""Container images, built by buildah from the container files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.marks import program

ROOT = Path(__file__).parents[2]
CERTIFICATES = "/etc/ssl/certs"


class Images:
    """Images in a store of their own. ``chroot`` isolation needs no container runtime."""

    def __init__(self, folder: Path) -> None:
        self._options = ["--root", folder / "root", "--runroot", folder / "run"]
        self._options += ["--storage-driver", "vfs"]
        self._environ = {**os.environ, "BUILDAH_ISOLATION": "chroot"}

    def command(self, *words: str | Path) -> list[str]:
        return [program("buildah", "buildah"), *map(str, self._options), *map(str, words)]

    def do(self, *words: str | Path, seconds: float = 600) -> str:
        """Raises CalledProcessError, with what was printed."""
        try:
            done = subprocess.run(
                self.command(*words),
                env=self._environ,
                check=True,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.CalledProcessError as error:
            error.add_note(f"{error.stdout}{error.stderr}"[-4000:])
            raise
        return done.stdout.strip()

    def start(self, *words: str | Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(*words), env=self._environ)

    def image_of(self, root: Path, name: str) -> None:
        """Make the image ``name`` of the files in ``root``."""
        container = self.do("from", "scratch")
        self.do("add", container, root, "/")
        self.do("commit", container, name)

    def build(self, file: str, tag: str, context: Path, *options: str) -> None:
        """Build the image ``tag`` from the container file ``file`` and a wheel of this tree.

        ``context``: an empty folder, which gets what the container file copies.
        """
        subprocess.run(
            [
                sys.executable,
                "-m",
                "build",
                "--no-isolation",
                "--wheel",
                "-o",
                context / "dist",
                ROOT,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (context / "constraints.txt").write_bytes((ROOT / "constraints.txt").read_bytes())
        mine = ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
        mine += ["--env", f"PIP_CERT={CERTIFICATES}/ca-certificates.crt", *options]
        path = ROOT / "packaging" / file
        self.do("bud", "--pull-never", "--network", "host", *mine, "-f", path, "-t", tag, context)

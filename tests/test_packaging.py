"""The Debian package, the container files and the workflow of a release."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.marks import program
from tmd import __version__
from tmd.extras import DISTRIBUTION

ROOT = Path(__file__).parents[1]
DEB = ROOT / "packaging" / "deb"
SCRIPTS = ("build", "postinst", "prerm", "postrm")
MAINTAINED = ("postinst", "prerm", "postrm")


def output(*command: str | Path, **options: Any) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_package_is_one_of_the_plain_shell(name: str) -> None:
    output("sh", "-n", DEB / name)

    assert (DEB / name).stat().st_mode & 0o111
    assert re.search(r"^set -eu?$", (DEB / name).read_text(), re.MULTILINE)


def test_an_upgrade_does_not_fail_with_the_daemon() -> None:
    """dpkg would leave the package half configured, and a later upgrade would fail, too."""
    script = (DEB / "postinst").read_text()
    (restart,) = re.findall(r"^.*systemctl try-restart.*$", script, re.MULTILINE)
    done = subprocess.run(
        ["sh", "-ec", f"systemctl() {{ return 1; }}\n{restart}", "postinst", "configure", "0.1.0"]
    )

    assert done.returncode == 0


@pytest.mark.parametrize("name", MAINTAINED)
def test_a_maintainer_script_asks_before_it_uses_systemd(name: str) -> None:
    """A package is installed into images as well, where no systemd runs."""
    lines = (DEB / name).read_text().splitlines()
    first = next((n for n, line in enumerate(lines) if "systemctl " in line and "echo" not in line))

    assert any("/run/systemd/system" in line for line in lines[:first])


# --- the built package ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, and beside it ``root`` with its files and ``control`` with its scripts."""
    program("dpkg-deb", "dpkg")
    folder = tmp_path_factory.mktemp("deb")
    output(sys.executable, "-m", "build", "--no-isolation", "-o", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    constraints = ("--constraint", ROOT / "constraints.txt")
    built = output(DEB / "build", wheel, folder, *constraints, env={"PATH": path}).strip()
    output("dpkg-deb", "-x", built, folder / "root")
    output("dpkg-deb", "-e", built, folder / "control")
    return Path(built)


@pytest.mark.thorough
def test_the_package_is_whole_and_holds_no_secret(package: Path) -> None:
    """Program, unit, user, configuration, manual page."""
    root, control = package.parent / "root", package.parent / "control"
    fields = output("dpkg-deb", "-f", package)
    unit = (root / "usr/lib/systemd/system/tmd.service").read_text()
    page = gzip.decompress((root / "usr/share/man/man8/tmd.8.gz").read_bytes()).decode()
    owners = {line.split()[1] for line in output("dpkg-deb", "-c", package).splitlines()}

    assert f"Version: {__version__}\n" in fields
    assert re.search(r"Depends: python3 \(>= 3\.\d+\), python3 \(<< 3\.\d+\)", fields)
    assert "ExecStart=/usr/lib/tmd/bin/tmd-daemon\n" in unit
    assert "Documentation=man:tmd(8)\n" in unit
    assert page.startswith(".TH TMD 8 ")
    assert (root / "usr/lib/sysusers.d/tmd.conf").read_text().startswith("u tmd ")
    assert (control / "conffiles").read_text() == "/etc/tmd/tmd.toml\n"
    assert {p.name for p in (root / "etc/tmd").iterdir()} == {"tmd.toml"}
    assert owners == {"root/root"}
    assert not (root / "opt").exists()  # where the documentation has pip install


@pytest.mark.thorough
def test_nothing_in_the_package_names_the_place_where_it_was_built(package: Path) -> None:
    root = package.parent / "root"
    files = [p for p in root.rglob("*") if p.is_file() and not p.is_symlink()]
    own = [p for p in files if "site-packages" not in p.parts]
    programs = [p for p in own if p.parent == root / "usr/lib/tmd/bin"]

    assert [p for p in own if b"/tmp/" in p.read_bytes() and p.suffix != ".toml"] == []
    assert {p.read_text().splitlines()[0] for p in programs} == {"#!/usr/lib/tmd/bin/python"}
    assert "/tmp/tmp" not in (root / "etc/tmd/tmd.toml").read_text()


@pytest.mark.thorough
def test_the_packaged_daemon_runs_with_what_the_package_brings(package: Path) -> None:
    """It starts, and it reads the configuration that the package brings."""
    root = package.parent / "root"
    python = root / "usr/lib/tmd/bin/python"
    version = output(python, "-P", "-m", "tmd.cli", "--version", cwd="/")
    usage = output(python, "-P", "-m", "tmd.daemon", "--help", cwd="/")
    origin = output(python, "-P", "-c", "import redis, tmd; print(redis.__file__, tmd.__file__)")
    shown = output(
        python, "-P", "-m", "tmd.cli", "config", "show", "-c", root / "etc/tmd/tmd.toml", cwd="/"
    )

    assert version == f"tmd {__version__}\n"
    assert "--config" in usage
    assert all(place.startswith(str(root)) for place in origin.split())
    assert 'secret_file = "/etc/tmd/secret"' in shown


# --- containers and the release -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.trainer"])
def test_no_image_runs_as_root(name: str) -> None:
    """By number, so that Kubernetes can check it; and no secret is copied into a layer."""
    text = (ROOT / "packaging" / name).read_text()
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)

    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    assert re.findall(r"^(?:COPY|ADD) .*secret", text, re.MULTILINE) == []


def test_the_image_of_the_daemon_has_no_torch() -> None:
    """But what the operator of Kubernetes needs."""
    text = (ROOT / "packaging" / "Containerfile").read_text()

    assert f"{DISTRIBUTION}[kubernetes]" in text
    assert "[trainer]" not in text
    assert 'ENTRYPOINT ["/opt/tmd/bin/tmd-daemon"]' in text
    assert f"{DISTRIBUTION}[trainer]" in (ROOT / "packaging" / "Containerfile.trainer").read_text()


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.trainer"])
def test_a_build_sends_what_an_image_copies_and_nothing_else(name: str) -> None:
    """The context of a build is the whole tree, with virtual environments of gigabytes."""
    text = (ROOT / "packaging" / name).read_text()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    first, *kept = (ROOT / ".dockerignore").read_text().split()

    assert first == "*"
    assert {f"!{source}" for source in copied} <= set(kept)
    assert f"-f packaging/{name} " in text


def test_every_action_of_a_release_has_a_version() -> None:
    """A branch may change under a release."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    used = re.findall(r"uses: \S+@(\S+)", text)

    assert used
    assert [
        version for version in used if not re.fullmatch(r"v\d[\d.]*|[0-9a-f]{40}", version)
    ] == []


def test_the_package_of_a_release_is_built_on_the_oldest_debian_and_attached() -> None:
    """What is built there runs on later ones with the same Python only: see its dependencies."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(workflow)["jobs"]

    assert jobs["debian"]["container"] == "debian:12"
    assert jobs["attach"]["needs"] == ["debian", "publish"]
    assert "dist/*.deb" in jobs["attach"]["steps"][-1]["run"]


def test_a_release_is_published_without_a_token() -> None:
    """Trusted publishing: one job may ask for an identity, and it builds nothing."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    asking = [name for name, job in jobs.items() if "id-token" in job["permissions"]]
    steps = [step.get("uses", "").partition("@")[0] for step in jobs["publish"]["steps"]]
    writing = [name for name, job in jobs.items() if "write" in job["permissions"].values()]

    assert asking == ["publish"]
    assert writing == ["publish", "attach"]
    assert steps == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert "secrets." not in text
    assert yaml.safe_load(text)["permissions"] == {}


def test_a_release_that_failed_half_way_can_be_run_again() -> None:
    """A release that exists is kept, and its files are replaced."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    create, upload = (line.strip() for line in text.splitlines() if "gh release" in line)

    assert create.startswith('gh release view "$GITHUB_REF_NAME" || gh release create ')
    assert upload.endswith("--clobber")

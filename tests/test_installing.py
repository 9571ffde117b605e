"""What operators install: a configuration, the unit, the manual page; also from a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tmd import __version__, cli
from tmd.cli import manual, shipped
from tmd.config import load
from tmd.core.values.errors import ConfigError
from tmd.extras import DISTRIBUTION

ROOT = Path(__file__).parents[1]
FILES = ("redis.acl", "secret", "tmd.toml")
UNIT = (ROOT / "systemd" / "tmd.service").read_text()


def run(
    *arguments: str | Path, cwd: Path | None = None, **own: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, *map(str, arguments)),
        env={**os.environ, **own},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
    )


def tmd(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run("-m", "tmd.cli", *arguments)


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


# --- tmd config init ------------------------------------------------------------------------------


def test_a_new_configuration_is_whole_and_its_secret_is_kept(tmp_path: Path) -> None:
    """Its parts name each other, also in another folder than the usual one."""
    folder = tmp_path / "new" / "tmd"
    done = tmd("config", "init", "--to", folder)
    checked = tmd("config", "check", "-c", folder / "tmd.toml")
    modes = {name: (folder / name).stat().st_mode & 0o777 for name in FILES}

    assert done.returncode == 0, done.stderr
    assert sorted(contents(folder)) == list(FILES)
    assert modes == {"redis.acl": 0o600, "secret": 0o600, "tmd.toml": 0o644}
    assert all(f"wrote {folder / name}" in done.stdout for name in FILES)
    assert f"tmd config check -c {folder / 'tmd.toml'}" in done.stdout
    assert checked.returncode == 0, checked.stderr
    assert len(load(folder / "tmd.toml").secret()) == 64


def test_each_configuration_has_a_secret_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tmd("config", "init", "--to", tmp_path / name)

    assert contents(tmp_path / "a")["secret"] != contents(tmp_path / "b")["secret"]


@pytest.mark.parametrize("name", FILES)
def test_what_is_there_is_overwritten_only_by_force(name: str, tmp_path: Path) -> None:
    """Not one of the other files is written either."""
    (tmp_path / name).write_text("mine")
    refused = tmd("config", "init", "--to", tmp_path)
    before = contents(tmp_path)
    forced = tmd("config", "init", "--to", tmp_path, "--force")

    assert refused.returncode == 2
    kept = "keeps the secret and writes the rest" if name == "secret" else "overwrites"
    assert f"already there: {tmp_path / name}; --force {kept}" in refused.stderr
    assert before == {name: "mine"}
    assert forced.returncode == 0, forced.stderr
    assert (contents(tmp_path)[name] == "mine") == (name == "secret")


def test_a_secret_is_replaced_only_by_an_option_of_its_own(tmp_path: Path) -> None:
    """The other hosts of a live cluster have it, too. What is kept is named."""
    (tmp_path / "secret").write_text("mine")
    forced = tmd("config", "init", "--to", tmp_path, "--force")
    after = contents(tmp_path)
    renewed = tmd("config", "init", "--to", tmp_path, "--force", "--new-secret")

    assert after["secret"] == "mine"
    assert sorted(after) == list(FILES)
    assert f"kept {tmp_path / 'secret'}" in forced.stdout
    assert "--new-secret" in forced.stdout
    assert renewed.returncode == 0, renewed.stderr
    assert len(contents(tmp_path)["secret"].strip()) == 64
    assert "kept" not in renewed.stdout


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """It names what would be written."""
    done = tmd("config", "init", "--to", tmp_path / "tmd", "--dry-run")

    assert done.returncode == 0
    assert all(f"would write {tmp_path / 'tmd' / name}" in done.stderr for name in FILES)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_refused_where_the_installation_would_be(tmp_path: Path) -> None:
    (tmp_path / "tmd.toml").touch()
    done = tmd("config", "init", "--to", tmp_path, "--dry-run")

    assert done.returncode == 2
    assert f"already there: {tmp_path / 'tmd.toml'}; --force overwrites" in done.stderr


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--to") as raised:
        shipped.write(shipped.configuration(tmp_path / "file" / "tmd", "s"), force=False)

    assert str(raised.value).startswith(f"cannot write {tmp_path / 'file' / 'tmd' / 'tmd.toml'}")


# --- tmd systemd install --------------------------------------------------------------------------


def test_the_unit_starts_the_daemon_of_this_environment(tmp_path: Path) -> None:
    """Nothing else in it changes."""
    done = tmd("systemd", "install", "--to", tmp_path)
    text = contents(tmp_path)["tmd.service"]
    changed = set(text.splitlines()) - set(UNIT.splitlines())
    (start,) = changed
    version = subprocess.run(
        [*start.removeprefix("ExecStart=").split(), "--help"], capture_output=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert start.startswith(f"ExecStart={Path(sys.executable).parent}")
    assert version.returncode == 0
    assert "systemctl daemon-reload" in done.stdout


def test_the_unit_reads_the_configuration_that_is_named(tmp_path: Path) -> None:
    """And hands the daemon the secret beside it."""
    folder = tmp_path / "conf"
    text = tmd("systemd", "install", "--dry-run", "-c", folder / "own.toml").stdout

    assert f"Environment=TMD_CONFIG={folder}/own.toml\n" in text
    assert f"LoadCredential=tmd-secret:{folder}/secret\n" in text
    assert "/etc/tmd/" not in re.sub(r"(?m)^#.*$", "", text)


@pytest.mark.parametrize(
    ("folder", "assignment", "secret"),
    [
        ("/etc/tmd/prod", "TMD_CONFIG=/etc/tmd/prod/tmd.toml", "/etc/tmd/prod/secret"),
        ("/etc/tmd", "TMD_CONFIG=/etc/tmd/tmd.toml", "/etc/tmd/secret"),
        ("/a b", '"TMD_CONFIG=/a b/tmd.toml"', "/a b/secret"),
        ("/it's", '"TMD_CONFIG=/it\'s/tmd.toml"', "/it's/secret"),
        ("/100%", "TMD_CONFIG=/100%%/tmd.toml", "/100%%/secret"),
    ],
)
def test_the_unit_names_the_configuration_as_systemd_reads_it(
    folder: str, assignment: str, secret: str
) -> None:
    """Also below the usual folder. A credential's path is not unquoted."""
    unit = shipped.unit(Path("/unit"), "/bin/true", Path(folder) / "tmd.toml")
    changed = {
        "Environment=TMD_CONFIG=/etc/tmd/tmd.toml": f"Environment={assignment}",
        "LoadCredential=tmd-secret:/etc/tmd/secret": f"LoadCredential=tmd-secret:{secret}",
        "ExecStart=/usr/bin/env tmd-daemon": "ExecStart=/bin/true",
    }

    lines = [line for line in unit.text.splitlines() if not line.startswith("#")]
    shipped_lines = [line for line in UNIT.splitlines() if not line.startswith("#")]
    assert lines == [changed.get(line, line) for line in shipped_lines]


def test_a_path_that_no_unit_can_name_is_refused() -> None:
    """A line break would begin another line of the unit."""
    with pytest.raises(ConfigError, match="another folder"):
        shipped.unit(Path("/unit"), "/bin/true", Path("/a\nExecStartPre=/b/tmd.toml"))


def test_a_dry_run_prints_the_unit_and_installs_nothing(tmp_path: Path) -> None:
    done = tmd("systemd", "install", "--to", tmp_path, "--dry-run")

    assert done.returncode == 0
    assert done.stdout.startswith(UNIT.splitlines()[0])
    assert list(tmp_path.iterdir()) == []


def test_the_option_before_the_verb_names_the_configuration_of_the_unit(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    text = tmd("--config", own, "systemd", "install", "--dry-run").stdout

    assert f"TMD_CONFIG={own}" in text


def test_a_python_that_a_link_leads_to_is_warned_of_as_well(tmp_path: Path) -> None:
    """As that of a virtual environment in /opt whose Python is in a home folder."""
    (tmp_path / "tmd.toml").symlink_to("/root/tmd.toml")
    settings = tmp_path / "tmd.toml"
    done = tmd("systemd", "install", "--to", tmp_path, "--dry-run", "--config", settings)

    assert "tmd: warning: the unit hides /root/tmd.toml from the daemon (P" in done.stderr


def test_each_link_on_the_way_to_a_file_is_warned_of(tmp_path: Path) -> None:
    """The folder leads to another one that is hidden, and the file in that leads out of it."""
    hidden, linked = tmp_path / "hidden", tmp_path / "linked"
    hidden.mkdir()
    linked.symlink_to("hidden")
    (hidden / "tmd.toml").symlink_to("/etc/tmd.toml")
    done = tmd("systemd", "install", "--to", tmp_path, "--dry-run", "-c", linked / "tmd.toml")

    for place in (linked / "tmd.toml", hidden / "tmd.toml"):
        assert f"tmd: warning: the unit hides {place} from the daemon (P" in done.stderr


def test_links_in_a_loop_are_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    done = tmd("systemd", "install", "--to", tmp_path, "--dry-run", "--config", tmp_path / "a/x")

    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)


@pytest.mark.parametrize("folder", ["/home/me", "/root", "/tmp", "/var/tmp"])
def test_a_configuration_that_the_unit_hides_is_warned_of(tmp_path: Path, folder: str) -> None:
    settings = f"{folder}/tmd.toml"
    done = tmd("systemd", "install", "--to", tmp_path, "--dry-run", "--config", settings)

    assert done.returncode == 0
    assert f"tmd: warning: the unit hides {settings} from the daemon (P" in done.stderr


def test_a_unit_of_the_operators_own_stays(tmp_path: Path) -> None:
    (tmp_path / "tmd.service").write_text("mine")
    done = tmd("systemd", "install", "--to", tmp_path)

    assert done.returncode == 2
    assert "--force" in done.stderr
    assert contents(tmp_path) == {"tmd.service": "mine"}


def test_systemd_takes_the_installed_unit(tmp_path: Path) -> None:
    """A unit that its checker refuses is an error."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: install systemd")
    good = tmd("systemd", "install", "--to", tmp_path, "-c", "/a b/100%n/tmd.toml")
    unit = tmp_path / "tmd.service"
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )

    assert good.returncode == 0, good.stderr
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("python", "has_program", "command"),
    [
        ("/opt/tmd/bin/python", True, "/opt/tmd/bin/tmd-daemon"),
        ("/usr/bin/python3", False, "/usr/bin/python3 -m tmd.daemon"),
        ("/opt/a b/bin/python", True, '"/opt/a b/bin/tmd-daemon"'),
        ("/opt/100%/bin/python", True, "/opt/100%%/bin/tmd-daemon"),
        ("/opt/it's/bin/python", True, '"/opt/it\'s/bin/tmd-daemon"'),
    ],
)
def test_the_command_of_an_environment(python: str, has_program: bool, command: str) -> None:
    """A target folder has no programs; systemd reads quotes and percent signs."""
    assert shipped.daemon_command(Path(python), has_program=has_program) == command


# --- the manual page ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of manual pages."""
    folder = tmp_path_factory.mktemp("share")
    done = tmd("man", "--to", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_page_that_the_unit_names_exists(share: Path) -> None:
    cited = re.findall(r"man:([\w-]+)\((\d)\)", UNIT)

    assert cited
    for name, section in cited:
        text = (share / f"man{section}" / f"{name}.{section}").read_text()
        assert text.startswith(f".TH {name.upper()} {section} ")


def test_every_verb_and_every_option_is_on_the_page(share: Path) -> None:
    """Also of the verbs that are loaded only to be run."""
    text = (share / "man8" / "tmd.8").read_text().replace("\\-", "-")
    found = re.findall(r"(?m)^\.SS (tmd [a-z -]*[a-z])", text)
    verbs = list(leaves(cli.verbs(), ("tmd",)))

    assert found == [" ".join(path) for path, _ in verbs]
    assert "tmd campaign run" in found
    for path, command in verbs:
        part = text.partition(f".SS {' '.join(path)}")[2].partition("\n.SS ")[0]
        names = [name for p in command.params for name in p.opts if name.startswith("--")]
        assert [name for name in names if name not in part] == []


def leaves(command: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if not inner:
        return [(path, command)]
    return [found for name in sorted(inner) for found in leaves(inner[name], (*path, name))]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [("groff", ("-man", "-ww", "-z", "-Tutf8")), ("man", ("--warnings", "-l"))],
)
def test_the_page_renders_without_a_warning(
    program: str, arguments: tuple[str, ...], share: Path
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program}: install man-db and groff")
    done = subprocess.run(
        [program, *arguments, str(share / "man8" / "tmd.8")],
        env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MAN_KEEP_FORMATTING": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (".TH", "\\&.TH"),
        ("'quoted'", "\\&'quoted'"),
        ("a\\b", "a\\eb"),
        ("--all", "\\-\\-all"),
        ("5 €", "5 \\[u20AC]"),
    ],
)
def test_no_text_is_taken_for_a_command_of_roff(text: str, shown: str) -> None:
    assert manual._plain(text) == shown


# --- a wheel --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution, and the wheel that was built from it without network."""
    folder = tmp_path_factory.mktemp("built")
    skip = shutil.ignore_patterns(".*", "*.egg-info", "build", "tests", "bench", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=skip)
    done = run("-m", "build", "--no-isolation", "--outdir", folder, folder / "source")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(built: Path, wheel: Path) -> Path:
    """A folder into which the wheel was installed without network."""
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index")
    done = run(*pip, "--target", built / "target", wheel)
    assert done.returncode == 0, done.stderr
    return built / "target"


def test_the_distribution_has_a_name_of_its_own(built: Path, wheel: Path) -> None:
    """The name tmd belongs to another project, so no extra may ask for it either."""
    (source,) = built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (facts,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = archive.read(facts).decode()

    assert source.name == f"tmd_trainmover-{__version__}.tar.gz"
    assert f"Name: {DISTRIBUTION}\n" in metadata
    assert len(re.findall(r"Requires-Dist: tmd-trainmover\[trainer\]; extra ==", metadata)) == 4
    assert re.findall(r"Requires-Dist: tmd\b(?!-)", metadata) == []


def test_the_metadata_name_the_licence_of_everything_in_the_wheel(wheel: Path) -> None:
    """Also of what is vendored, whose licence must come with it."""
    vendored = {f.relative_to(ROOT).as_posix() for f in ROOT.glob("tmd/**/vendor/*/LICENSE")}
    with zipfile.ZipFile(wheel) as archive:
        (facts,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = archive.read(facts).decode()
        brought = {n.partition("/licenses/")[2] for n in archive.namelist() if "/licenses/" in n}
        texts = [archive.read(name).decode() for name in archive.namelist() if name in vendored]

    assert "\nLicense-Expression: Apache-2.0 AND MIT\n" in metadata
    assert brought == {"LICENSE", *vendored}
    assert len(texts) == len(vendored) == 1
    assert all(text.startswith("The MIT License") for text in texts)


def test_no_remedy_installs_the_project_of_another() -> None:
    """`pip install tmd` would bring a stranger's package."""
    texts = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "tmd").rglob("*.py")]
    wrong = re.compile(r"pip install [^\n`]*?\btmd(?!-trainmover)(\[|'| |$)")
    found = [path for path in texts if wrong.search(path.read_text())]

    assert found == []


def test_the_wheel_has_every_file_of_every_package(wheel: Path) -> None:
    """Also those that are not Python: scenarios, tables, pages, units, rules."""
    folders = {"tmd": "tmd", "detectors": "tmd_detectors", "policies": "tmd_policies"}
    folders |= {"systemd": "tmd_systemd", "monitoring": "tmd_monitoring"}
    files = [
        (top, file.relative_to(ROOT / top))
        for top in folders
        for file in (ROOT / top).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    wanted = {f"{folders[top]}/{file}" for top, file in files}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert len(wanted) > 300
    assert packed == wanted


def test_a_wheel_brings_all_that_operators_install(installed: Path, tmp_path: Path) -> None:
    """What it writes is what a checkout writes."""
    there, here = tmp_path / "there", tmp_path / "here"
    where = run(
        *("-c", "import tmd, tmd_systemd; print(tmd.__file__, tmd_systemd.__file__)"),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    for arguments in (
        ("config", "init", "--to", there / "etc"),
        ("systemd", "install", "--to", there / "unit"),
        ("man", "--to", there / "share"),
    ):
        done = run("-m", "tmd.cli", *arguments, cwd=tmp_path, PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stderr
    tmd("config", "init", "--to", here)
    texts = contents(there / "etc"), contents(here)

    assert all(place.startswith(str(installed)) for place in where.stdout.split())
    assert [text["redis.acl"] for text in texts] == [shipped.text_of("redis.acl")] * 2
    assert texts[0]["tmd.toml"].replace(str(there / "etc"), str(here)) == texts[1]["tmd.toml"]
    assert "ExecStart=" in contents(there / "unit")["tmd.service"]
    assert (there / "share" / "man8" / "tmd.8").exists()


def test_a_shipped_file_is_in_the_wheel_once(installed: Path) -> None:
    """From one source: the folder systemd."""
    for name in ("tmd.service", "tmd.toml", "redis.acl"):
        (found,) = [f for f in installed.rglob(name) if f.is_file()]
        assert found.read_text() == (ROOT / "systemd" / name).read_text()

"""The operators' files that ship with tmd, adapted to this machine."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from msgspec import Struct

from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import os_reason, place_remedy

PACKAGE = "tmd_systemd"
"""The folder ``systemd`` of the source tree."""
MONITORING = "tmd_monitoring"
"""The folder ``monitoring`` of the source tree."""
DOCUMENTATION = "https://docs.example"
"""The address that the shipped alert rules give for the documentation."""
SECRET = "secret"
"""The file of the cluster's secret."""
FOLDER = "/etc/tmd"
"""The path where the shipped files expect each other."""
_HERE = re.compile(
    rf"(?m)(?P<start>^ExecStart=.*$)|(?P<settings>TMD_CONFIG={FOLDER}/tmd\.toml)"
    rf"|{FOLDER}/(?P<name>[\w.-]+)"
)
"""Lines of the unit that depend on this machine."""


class File(Struct, frozen=True):
    """A file to be written."""

    path: Path
    text: str
    mode: int


def text_of(name: str, package: str = PACKAGE) -> str:
    """The shipped file ``name``."""
    return (resources.files(package) / name).read_text()


def configuration(folder: Path, secret: str) -> tuple[File, ...]:
    """The files for ``folder``: the configuration, the cluster's secret, the users of Redis."""
    settings = text_of("tmd.toml").replace(f"{FOLDER}/", f"{folder}/")
    return (
        File(folder / "tmd.toml", settings, 0o644),
        File(folder / SECRET, secret + "\n", 0o600),
        File(folder / "redis.acl", text_of("redis.acl"), 0o600),
    )


def monitoring(folder: Path, documentation: str) -> tuple[File, ...]:
    """The alert rules of Prometheus, whose runbook is at ``documentation``, and the dashboard.

    Raises:
        ConfigError: ``documentation`` is no address.
    """
    place = documentation_at(documentation)
    rules = text_of("tmd-alerts.yml", MONITORING).replace(DOCUMENTATION, place)
    return (
        File(folder / "tmd-alerts.yml", rules, 0o644),
        File(folder / "tmd-dashboard.json", text_of("tmd-dashboard.json", MONITORING), 0o644),
    )


def documentation_at(address: str) -> str:
    """``address`` without a slash at its end.

    Raises:
        ConfigError: it is no address.
    """
    if not re.fullmatch(r"(https?|file)://[^\s\"'\\]+", address):
        raise ConfigError(f"--docs {address!a}: give the address of the documentation")
    return address.rstrip("/")


def unit(folder: Path, command: str, settings: Path) -> File:
    """The unit that runs ``command`` with the configuration file ``settings``.

    Raises:
        ConfigError: a unit cannot contain the path ``settings``.
    """
    if not str(settings).isprintable():
        raise ConfigError(
            f"systemd cannot read the path {str(settings)!a}: move the configuration to another "
            "folder, with only printable characters in its name"
        )

    def here(found: re.Match[str]) -> str:
        match found.lastgroup:
            case "start":
                return f"ExecStart={command}"
            case "settings":
                return _quoted(f"TMD_CONFIG={settings}")
            case _:
                # systemd takes the rest of a credential's line literally.
                return str(settings.parent / found["name"]).replace("%", "%%")

    return File(folder / "tmd.service", _HERE.sub(here, text_of("tmd.service")), 0o644)


def daemon_command(python: Path, *, has_program: bool) -> str:
    """The command that starts the daemon in the environment of ``python``, quoted for systemd."""
    program = python.parent / "tmd-daemon"
    return _quoted(str(program)) if has_program else f"{_quoted(str(python))} -m tmd.daemon"


def _quoted(word: str) -> str:
    text = word.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"' if any(c in "\"'" or c.isspace() for c in text) else text


def check(files: tuple[File, ...], *, force: bool) -> None:
    """Check that :func:`write` would overwrite none of the files unasked.

    Raises:
        ConfigError: a file exists and ``force`` is not given.
    """
    present = [file.path for file in files if file.path.exists()]
    if not present or force:
        return
    names = ", ".join(map(str, present))
    if any(path.name == SECRET for path in present):
        raise ConfigError(f"already there: {names}; --force keeps the secret and writes the rest")
    raise ConfigError(f"already there: {names}; --force overwrites")


def write(files: tuple[File, ...], *, force: bool) -> None:
    """Write all files, or none if one already exists.

    Raises:
        ConfigError: a file exists and ``force`` is not given, or the folder cannot be written.
    """
    check(files, force=force)
    for file in files:
        try:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(file)
        except OSError as error:
            raise ConfigError(
                f"cannot write {file.path}: {os_reason(error)}; {place_remedy(error)} with --to"
            ) from None


def _replace(file: File) -> None:
    # Never readable by others, even briefly; a reader sees the old file or the new one.
    draft = file.path.with_name(f".{file.path.name}.new")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600, exist_ok=False)
    draft.write_text(file.text)
    draft.chmod(file.mode)
    draft.replace(file.path)

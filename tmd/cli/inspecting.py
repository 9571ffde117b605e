"""Verbs that inspect the installation: plugins, config check, config show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tmd.cli.common import ConfigOption, JsonOption
from tmd.cli.output import draw, print_json, say, say_lines, table
from tmd.core.values.printable import ascii_json

if TYPE_CHECKING:
    from tmd.config import Settings
    from tmd.daemon.plugins import PluginOrigin

config = typer.Typer(help="Check or show the configuration.", no_args_is_help=True)


def plugins(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List detectors and policies: their origin, and whether they are used."""
    from tmd.config import load
    from tmd.daemon.plugins import strangers

    settings = load(config)
    rows = plugin_rows(settings)
    if as_json:
        print_json(rows)
    else:
        _print_plugins(rows)
    for line in strangers(settings):
        say(f"tmd: warning: {line}", err=True)
    if any(row["problem"] for row in rows):
        raise typer.Exit(1)


def plugin_rows(settings: Settings) -> list[dict[str, str]]:
    """Installed plug-ins: name, kind, origin, use, error."""
    from tmd.core.values.errors import ConfigError, PluginError
    from tmd.daemon.plugins import describe, installed, load
    from tmd.plugin import DETECTOR_GROUP, POLICY_GROUP, Detector, Policy

    rows = []
    for kind, group, base in (
        ("detector", DETECTOR_GROUP, Detector),
        ("policy", POLICY_GROUP, Policy),
    ):
        for point in installed(group):
            origin = describe(point)
            row = {"name": point.name, "kind": kind, "target": origin.target}
            row |= {"distribution": origin.distribution, "problem": "", "sources": ""}
            try:
                found = load([point], base, settings.plugins)
                instance = found[point.name][0] if found else None
                row["use"], row["sources"] = _use(settings, kind, origin, instance)
            except (ConfigError, PluginError) as error:
                row |= {"use": "broken", "problem": str(error)}
            rows.append(row)
    return rows


def _use(settings: Settings, kind: str, origin: PluginOrigin, plugin: Any) -> tuple[str, str]:
    """How it is used, and its sources on this host."""
    from tmd.daemon.plugins import configured

    name = origin.name
    if plugin is None:
        return "not allowed", ""
    if kind == "policy":
        return ("enabled" if name in settings.policies.enabled else "off"), ""
    if not settings.detector(name).enabled:
        return "off", ""
    detector = configured(plugin, origin, settings)
    why_not = detector.why_not()
    if why_not:
        return f"not supported: {why_not}", ""
    return detector.strategy.value, detector.sources()


def _print_plugins(rows: list[dict[str, str]]) -> None:
    found = []
    for row in rows:
        use = f"{row['use']}: {row['sources']}" if row["sources"] else row["use"]
        found.append((row["name"], row["kind"], use, row["distribution"], row["target"]))
    draw(table(("name", "kind", "use", "from", "class"), found))
    for row in rows:
        if row["problem"]:
            say_lines(row["problem"], err=True)


@config.command("check")
def check(config: ConfigOption = None) -> None:
    """Check everything the daemon would need, without starting it."""
    from tmd.config import DEFAULT_FILE, find_file, load, refuse_exposed
    from tmd.daemon.agent_socket import uids_of
    from tmd.daemon.plugins import load_detectors, load_policies, strangers
    from tmd.daemon.redis_client import connect

    file = find_file(config)
    if file is None:
        remedy = "'tmd config init' writes one, --config names another"
        text = f"there is no {DEFAULT_FILE}; only the environment is checked: {remedy}"
        say(f"tmd: {text}", err=True)
    settings = load(config)
    refuse_exposed(file)
    settings.secret()
    settings.http.token()
    connect(settings.redis_url(), settings.redis.timeout_s)
    uids_of(settings.host.users)
    detectors, policies = load_detectors(settings), load_policies(settings)
    for line in strangers(settings):
        say(f"tmd: warning: {line}", err=True)
    place = file or "the environment"
    say(f"{place} is valid: {len(detectors)} detectors, {len(policies)} policies")


@config.command("show")
def show(
    config: ConfigOption = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show where each value comes from.")
    ] = False,
) -> None:
    """Show the effective configuration as TOML; secrets are masked."""
    from tmd.config import find_file, load, read_file, variables

    settings = load(config)
    file = find_file(config)
    in_file = read_file(file)
    named = variables()
    for path, line in toml_of(settings):
        say(f"{line}  # {_origin(path, in_file, str(file), named)}" if origin and path else line)


def toml_of(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """The effective configuration: the path of each key, empty for other lines, and the line."""
    for section, values in _sections(settings).items():
        yield (), f"[{section}]"
        for key, value in values.items():
            yield (*section.split("."), key), f"{key} = {_toml(value)}"
        yield (), ""


def _sections(settings: Settings) -> dict[str, dict[str, Any]]:
    from tmd.schema import shown
    from tmd.sections import without_password

    values = shown(settings)
    url = values["redis"]["url"]
    values["redis"]["url"] = without_password(url) if url else url
    own = {f"policies.{name}": keys for name, keys in values["policies"].pop("own").items()}
    detectors = {name: shown(settings.detector(name)) for name in values.pop("detectors")}
    for name, keys in detectors.items():
        others = keys.pop("own")
        own[f"detectors.{name}"] = keys | others
    return {**values, **own}


def _toml(value: Any) -> str:
    import json

    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # Strings, numbers and booleans are the same in JSON and TOML; an unset value is empty.
    return '""' if value is None else ascii_json(json.dumps(value, ensure_ascii=False))


def _origin(
    path: tuple[str, ...], in_file: dict[str, Any], file: str, named: dict[tuple[str, ...], str]
) -> str:
    # A variable may give a single key or a whole table.
    for length in range(len(path), 0, -1):
        if path[:length] in named:
            return named[path[:length]]
    found: Any = in_file
    for part in path:
        if not isinstance(found, dict) or part not in found:
            return "default"
        found = found[part]
    return file

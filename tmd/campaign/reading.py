"""Finds and reads scenario files, and reports every mistake with file, key and remedy."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tmd.campaign.kind import FaultKind
from tmd.campaign.scenario import (
    EACH_POINT,
    ClusterPart,
    Expected,
    FaultPart,
    JobPart,
    Scenario,
    Story,
)
from tmd.core.values.errors import ConfigError
from tmd.core.values.reasons import in_words
from tmd.schema import Problem, S, Section, read

NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
PARTS: dict[str, type[Section]] = {"cluster": ClusterPart, "job": JobPart, "scenario": Scenario}
EXPECTED = ("expect", "voted")
ANY_PROCESS = "somebody"
NOT_INSIDE = ("leaver", "standby", "leader", "follower", "all", "half")
INSIDE = "'rank N', 'host NAME', 'followed', 'joiner' or 'somebody'"
"""Of these, 'joiner' and 'somebody' denote the first process that reaches the point."""
HELD = "process.held"
"""Keeps a process at a point while faults strike that do not wait for one."""
LASTING = ("for_s", "until")
"""Keys of a duration."""


def shipped() -> dict[str, Path]:
    """The files that come with tmd: name -> file."""
    folder = Path(str(resources.files("tmd.campaign.scenarios")))
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def stories(wanted: Sequence[str], kinds: Mapping[str, FaultKind]) -> tuple[Story, ...]:
    """The stories of ``wanted``, names of shipped ones or files; all shipped ones if empty.

    Raises:
        ConfigError: a file is missing or has a mistake.
    """
    return tuple(load(_file(name), kinds) for name in wanted or shipped())


def _file(name: str) -> Path:
    known = shipped()
    if name in known:
        return known[name]
    if Path(name).exists():
        return Path(name)
    raise ConfigError(f"there is no scenario file '{name}'{nearest(name, known)}")


def load(file: Path, kinds: Mapping[str, FaultKind]) -> Story:
    """The story in ``file``. ``kinds``: the known kinds of fault by name.

    Raises:
        ConfigError: a line for each mistake.
    """
    try:
        values = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {in_words(error)}") from error
    story, problems = parse(file.stem, values, kinds)
    if story is None:
        raise ConfigError("\n".join(f"{file}: {_sentence(problem)}" for problem in problems))
    return story


def parse(
    name: str, values: Mapping[str, Any], kinds: Mapping[str, FaultKind]
) -> tuple[Story | None, list[Problem]]:
    """The story in ``values``, or all its mistakes."""
    problems = [Problem((key,)) for key in values if key not in PARTS]
    cluster, wrong = read(ClusterPart, values.get("cluster", {}), ("cluster",))
    job, more = read(JobPart, values.get("job", {}), ("job",))
    problems += wrong + more
    scenarios: list[Scenario] = []
    for number, given in enumerate(_tables(values.get("scenario", []), problems), start=1):
        called = str(given.get("name", number)) if isinstance(given, Mapping) else str(number)
        found, wrong = _scenario(given, ("scenario", called), kinds)
        problems += wrong
        if found is not None:
            for scenario in found.at_each_point():
                problems += _twice(scenario, scenarios)
                scenarios.append(scenario)
            problems += _pointless(found)
            problems += _beyond(found, cluster) if cluster is not None else []
    if not scenarios and not problems:
        problems.append(Problem(("scenario",), "there is none: write at least one [[scenario]]"))
    if problems or cluster is None or job is None:
        return None, problems
    return Story(name=name, cluster=cluster, job=job, scenarios=tuple(scenarios)), []


def _scenario(
    given: Any, where: tuple[str, ...], kinds: Mapping[str, FaultKind]
) -> tuple[Scenario | None, list[Problem]]:
    if not isinstance(given, Mapping):
        return None, [Problem(where, "expected a table of keys")]
    problems: list[Problem] = []
    faults = []
    for number, table in enumerate(_tables(given.get("faults", []), problems), start=1):
        place = (*where, "faults", str(number))
        fault = _part(FaultPart, table, place, problems)
        if fault is not None and fault.kind not in kinds:
            message = f"there is no kind '{fault.kind}'{nearest(fault.kind, kinds)}"
            problems.append(Problem((*place, "kind"), message))
        elif fault is not None:
            wrong = _misplaced(fault, kinds[fault.kind]) | _mistimed(fault, kinds[fault.kind])
            problems += (Problem((*place, key), message) for key, message in wrong.items())
        faults.append(fault)
    expect = _part(Expected, given.get("expect", {}), (*where, "expect"), problems)
    voted = (
        _part(Expected, given["voted"], (*where, "voted"), problems) if "voted" in given else None
    )
    plain = {k: v for k, v in given.items() if k not in ("faults", *EXPECTED)}
    if "name" not in plain or not NAME.fullmatch(str(plain["name"])):
        problems.append(Problem((*where, "name"), "use small letters, digits and hyphens"))
        return None, problems
    found = _part(Scenario, plain, where, problems)
    if not faults and not problems:
        problems.append(Problem((*where, "faults"), "there is none: name at least one fault"))
    if problems or found is None or expect is None:
        return None, problems
    whole = tuple(fault for fault in faults if fault is not None)
    values = {key: getattr(found, key) for key in found.__struct_fields__}
    return Scenario(**{**values, "faults": whole, "expect": expect, "voted": voted}), []


def _misplaced(fault: FaultPart, kind: FaultKind) -> dict[str, str]:
    """By key: why a fault of this kind cannot happen there."""
    word = fault.where.partition(" ")[0]
    if kind.inside and word in NOT_INSIDE:
        return {"where": f"{kind.name} happens within a process: write {INSIDE}"}
    if not kind.inside and word == ANY_PROCESS:
        only = f"'{ANY_PROCESS}' works only within a process"
        return {"where": f"{kind.name} needs a definite target: {only}"}
    return {}


def _mistimed(fault: FaultPart, kind: FaultKind) -> dict[str, str]:
    """By key: why it would have no effect on a fault of this kind."""
    if not kind.inside:
        if not fault.point:
            return {}
        held = f'{{ kind = "{HELD}", when = "{fault.when}" }}'
        remedy = f"write 'now' or 'phase PHASE', after a fault {held}"
        return {"when": f"{kind.name} does not wait for a point: {remedy}"}
    found = {}
    if fault.phase is not None:
        found["when"] = f"{kind.name} strikes at a point, in whatever phase: write 'at POINT'"
    for key in LASTING:
        if getattr(fault, key):
            found[key] = f"{kind.name} has no duration: leave it out"
    return found


def _part(kind: type[S], given: Any, where: tuple[str, ...], problems: list[Problem]) -> S | None:
    if kind is FaultPart and isinstance(given, Mapping) and "kind" not in given:
        problems.append(Problem((*where, "kind"), "it is missing; 'tmd campaign list' shows all"))
        return None
    found, wrong = read(kind, given, where)
    problems += wrong
    return found


def _tables(given: Any, problems: list[Problem]) -> Iterable[Any]:
    if isinstance(given, list):
        return given
    problems.append(Problem(("scenario",), "expected a list of tables: [[scenario]]"))
    return ()


def _twice(found: Scenario, before: Sequence[Scenario]) -> list[Problem]:
    if all(found.name != other.name for other in before):
        return []
    return [Problem(("scenario", found.name, "name"), "another scenario has this name")]


def _pointless(found: Scenario) -> list[Problem]:
    """Points without a fault that strikes at them, and such a fault without points."""
    if bool(found.points) == any(fault.when == EACH_POINT for fault in found.faults):
        return []
    message = f"write both: points = [...], and when = '{EACH_POINT}' in a fault"
    return [Problem(("scenario", found.name, "points"), message)]


def _beyond(found: Scenario, cluster: ClusterPart) -> list[Problem]:
    """Ranks and hosts that do not exist in the cluster."""
    last = cluster.ranks - 1
    hosts = (*cluster.active, *cluster.spare)
    problems = []
    for key, expect in zip(EXPECTED, (found.expect, found.voted), strict=True):
        if any(not 0 <= rank <= last for rank in (expect and expect.moved) or ()):
            more = "or more ranks in [cluster]"
            message = f"the last rank is {last}: write ranks from 0 to {last}, {more}"
            problems.append(Problem(("scenario", found.name, key, "moved"), message))
    for number, fault in enumerate(found.faults, start=1):
        where = ("scenario", found.name, "faults", str(number), "where")
        if fault.rank is not None and fault.rank > last:
            more = "or more ranks in [cluster]"
            message = f"the last rank is {last}: write one from 0 to {last}, {more}"
            problems.append(Problem(where, message))
        if fault.host and fault.host not in hosts:
            message = f"there is no host '{fault.host}'; there are {', '.join(hosts)}"
            problems.append(Problem(where, message))
        if fault.where == "followed" and not cluster.hot:
            problems.append(Problem(where, "no standby follows a rank: [cluster] hot = 1"))
    return problems


def _sentence(problem: Problem) -> str:
    where = problem.where
    key = f"[{'.'.join(where[:-1])}] {where[-1]}" if len(where) > 1 else where[0]
    if problem.message:
        return f"{key}: {problem.message}"
    return f"unknown key {key}{nearest(where[-1], _known(where[:-1]))}"


def _known(where: tuple[str, ...]) -> Collection[str]:
    if not where:
        return PARTS
    if "faults" in where:
        return FaultPart.__struct_fields__
    kind = Expected if where[-1] in EXPECTED else PARTS[where[0]]
    return kind.__struct_fields__


def nearest(word: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown word."""
    near = difflib.get_close_matches(word, list(known), n=1)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known are {', '.join(sorted(known))}" if known else ""

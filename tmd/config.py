"""The configuration: one TOML file, overlaid by ``TMD_<SECTION>__<KEY>`` variables.

Each key is documented where it is declared. Unknown keys are errors that name the file, the key
and the nearest known one. Nothing here has an effect; secrets are read on demand.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import os
import socket
import tomllib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from msgspec import field, structs

from tmd.core.values.errors import ConfigError
from tmd.core.values.model import Strategy
from tmd.core.values.names import wrong_name, wrong_plain
from tmd.core.values.numbers import NotNegative, Positive
from tmd.core.values.printable import printable
from tmd.core.values.reasons import in_words, os_reason
from tmd.folders import SOCKET, default_dir
from tmd.schema import Invalid, Problem, Secret, Section, Text, plain, read
from tmd.sections import (
    MIN_SECRET,
    BreakerSection,
    DetectorSection,
    Http,
    InjectSection,
    LimitsSection,
    Policies,
    ShadowSection,
    Triage,
    WebhookSection,
    inline_secrets,
    is_public,
    read_secret,
    without_password,
)

ENV_PREFIX = "TMD_"
ENV_FILE = "TMD_CONFIG"
DEFAULT_FILE = Path("/etc/tmd/tmd.toml")
ACTING = frozenset({"trainer"})
"""Detectors that act unless the configuration says otherwise."""
DEEPEST = 64
"""Levels of tables and lists in the file."""
_SOCKET_PATH_LIMIT = 100


class Cluster(Section, frozen=True):
    name: str = "default"
    """Clusters with different names share a Redis without seeing each other."""
    secret: Secret | None = None
    """The keys of all jobs derive from it. Prefer TMD_CLUSTER__SECRET or secret_file."""
    secret_file: Path | None = None
    """File with the secret. Others must not be able to read it."""

    def __post_init__(self) -> None:
        if wrong := wrong_plain(self.name):
            raise Invalid(wrong, "name")


class Redis(Section, frozen=True):
    url: str | None = None
    """redis://, rediss://, unix:// or redis+sentinel://host:port,host:port/service/db, where
    ``?sentinel_password=`` is the password of the Sentinels. There is no default: a daemon without
    it does not start."""
    timeout_s: Positive = 2.0
    """Longest wait for one answer of Redis."""

    def __repr__(self) -> str:
        shown = None if self.url is None else without_password(self.url)
        return f"Redis(url={shown!r}, timeout_s={self.timeout_s!r})"


class Host(Section, frozen=True):
    name: str = field(default_factory=socket.gethostname)
    """Name of this host, unique in the cluster: of two machines that share it, one is ignored."""
    standby: bool = False
    """Workers on this host start as standbys and get no rank when a job forms."""
    advertise: str = field(default_factory=lambda: _own_address())
    """Address at which workers on this host accept links of their peers."""
    runtime_dir: Path = field(default_factory=lambda: default_dir("RUNTIME_DIRECTORY"))
    """Folder of the socket, unless ``socket`` names a path. The default is that of the service
    (``/run/tmd``); a user other than root has one of their own while no daemon is there."""
    socket: Path = Path()
    """Unix socket for trainers and launchers."""
    state_dir: Path = field(default_factory=lambda: default_dir("STATE_DIRECTORY"))
    """Folder for what must survive a restart: journal, lease epochs, memory of detectors."""
    users: tuple[str, ...] = ()
    """Users whose trainers may connect, besides root and the user of the daemon."""
    heartbeat_s: Positive = 1.0
    """Period of the heartbeat. Urgent changes are published at once."""
    ttl_s: Positive = 3.0
    """A host whose heartbeat is older than this is silent. At least twice ``heartbeat_s``."""

    def __post_init__(self) -> None:
        if wrong := wrong_name(self.name):
            raise Invalid(wrong, "name")
        for number, user in enumerate(self.users, start=1):
            if wrong := wrong_name(user):
                raise Invalid(f"entry {number}: {wrong}", "users")
        if self.socket == Path():
            structs.force_setattr(self, "socket", self.runtime_dir / SOCKET)
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_LIMIT:
            raise Invalid(f"socket path {self.socket} is too long; choose a shorter runtime_dir")
        if self.ttl_s < 2 * self.heartbeat_s:
            raise Invalid("ttl_s must be at least twice heartbeat_s")


class LeaderSection(Section, frozen=True):
    candidate: bool = True
    """Whether this daemon may lead."""
    ttl_s: Positive = 9.0
    """Lifetime of the lease: a dead leader is replaced after at most this time. At least twice
    ``renew_s``."""
    renew_s: Positive = 3.0
    """Period at which the leader renews its lease."""
    poll_s: Positive = 1.0
    """The leader and the daemons read everything again after this time, even without a wake-up."""
    unprotected_s: Positive = 30.0
    """How long a finding of the leader, such as ``job.no_fit_standby``, lasts before an alert."""
    list_ended_h: NotNegative = 168.0
    """Hours for which ``tmd status`` lists a job that has ended; 0: until ``tmd forget``."""

    def __post_init__(self) -> None:
        if 2 * self.renew_s > self.ttl_s:
            raise Invalid("ttl_s must be at least twice renew_s")

    @property
    def answer_s(self) -> float:
        """Longest wait for the store in a renewal, so that one lost answer never costs the lease:
        renew + 2 * answer <= ttl."""
        return (self.ttl_s - self.renew_s) / 2


class Plugins(Section, frozen=True):
    allow: tuple[str, ...] = ()
    """Plug-ins to load. Empty means all that are installed."""
    deny: tuple[str, ...] = ()
    """Plug-ins that are never loaded."""


class Log(Section, frozen=True):
    format: Literal["console", "json"] = "console"
    """``console`` for people, ``json`` for programs."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe lines that are written: ``debug``, ``info``, ``warning`` or ``error``."""


class Settings(Section, frozen=True):
    """All settings. Use :func:`load`."""

    cluster: Cluster = Cluster()
    redis: Redis = Redis()
    host: Host = field(default_factory=Host)
    leader: LeaderSection = LeaderSection()
    limits: LimitsSection = LimitsSection()
    shadow: ShadowSection = ShadowSection()
    policies: Policies = Policies()
    plugins: Plugins = Plugins()
    breaker: BreakerSection = BreakerSection()
    triage: Triage = Triage()
    inject: InjectSection = InjectSection()
    detectors: dict[str, DetectorSection] = {}
    http: Http = Http()
    webhook: WebhookSection = WebhookSection()
    log: Log = Log()

    def redis_url(self) -> str:
        """The configured URL; there is no default in production."""
        if not self.redis.url:
            raise ConfigError(
                'no Redis is configured: set url = "redis://host:6379" under [redis] or '
                "TMD_REDIS__URL; to try tmd without one, run 'tmd demo'"
            )
        return self.redis.url

    def secret(self) -> bytes:
        """The cluster's secret."""
        given = self.cluster.secret
        file = self.cluster.secret_file
        text = given.reveal() if given else ""
        if given is None and file is not None:
            text = read_secret(file, "[cluster] secret_file")
        if len(text) < MIN_SECRET:
            raise ConfigError(
                f"the cluster secret has {len(text)} characters, at least {MIN_SECRET} are needed: "
                "set TMD_CLUSTER__SECRET or [cluster] secret_file, "
                "for example to the output of 'openssl rand -hex 32'"
            )
        return text.encode(errors="surrogateescape")

    def job_keys(self) -> Callable[[str], bytes]:
        """The function job -> key of its links. Reads the secret now."""
        secret, cluster = self.secret(), self.cluster.name
        return lambda job: hmac.digest(secret, f"{cluster}/{job}".encode(), hashlib.sha256)

    def store_key(self) -> bytes:
        """The key that seals the values of cluster members in the store. Reads the secret."""
        return store_key(self.secret(), self.cluster.name)

    def detector(self, name: str) -> DetectorSection:
        """Settings of one detector; an unconfigured third-party detector only observes."""
        return self.detectors.get(name, DetectorSection(strategy=_default_strategy(name)))


def store_key(secret: bytes, cluster: str) -> bytes:
    """The key that seals values in the store of ``cluster``."""
    # The NUL separates it from every job's key: no job name contains one.
    return hmac.digest(secret, f"{cluster}\0store".encode(), hashlib.sha256)


SECTIONS: dict[str, type[Section]] = {
    f.name: f.type for f in structs.fields(Settings) if f.name != "detectors"
}


def find_file(path: Path | None) -> Path | None:
    """The file that :func:`load` reads: ``path``, ``$TMD_CONFIG``, or the system's if it exists."""
    if path is not None:
        return path
    if os.environ.get(ENV_FILE):
        return Path(os.environ[ENV_FILE])
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def read_file(path: Path | None) -> dict[str, Any]:
    """Contents of a TOML file; nothing for ``None``."""
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {os_reason(error)}") from error
    except ValueError as error:  # also of bytes that are no UTF-8, and of endless numbers
        raise ConfigError(f"{path} is not valid TOML: {in_words(error)}") from error
    except RecursionError:
        found = None
    if found is None or _is_deep(found):
        raise ConfigError(f"{path}: tables and lists stand more than {DEEPEST} levels deep")
    return found


def _is_deep(values: Any) -> bool:
    level = [values]
    for _ in range(DEEPEST):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return bool(level)


def refuse_exposed(file: Path | None) -> None:
    """Refuse secrets in a public file, as for ``secret_file``.

    Raises:
        ConfigError: every user of this host can read a secret in ``file``.
    """
    if file is None or not is_public(file):
        return
    keys = inline_secrets(read_file(file))
    if keys:
        raise ConfigError(
            f"{file} can be read by everybody and holds a secret, {', '.join(keys)}: give the file "
            "mode 640 and the group of the users who run tmd, or keep the value in a variable "
            "TMD_<SECTION>__<KEY>, that of [cluster] secret also in secret_file"
        )


def load(path: Path | None = None) -> Settings:
    """The validated settings.

    Raises:
        ConfigError: names the place, the key and the remedy; several lines if several are wrong.
    """
    file = find_file(path)
    values = read_file(file)
    named = variables()
    for key, name in named.items():
        if key[0] not in Settings.__struct_fields__:
            known = Settings.__struct_fields__
            raise ConfigError(printable(f"{name}: unknown section{nearest(key[0], known)}"))
    settings, problems = parse(_overlaid(values, named, file))
    if settings is None:
        lines = (printable(_explain(problem, file, values)) for problem in problems)
        raise ConfigError("\n".join(lines))
    return settings


def parse(values: dict[str, Any]) -> tuple[Settings | None, list[Problem]]:
    """The settings in ``values``, or all mistakes in them."""
    found: dict[str, Any] = {}
    problems = [Problem((name,)) for name in values if name not in Settings.__struct_fields__]
    # Including absent sections: defaults are checked as well.
    for name, kind in SECTIONS.items():
        found[name], wrong = read(kind, values.get(name, {}), (name,))
        problems += wrong
    found["detectors"], wrong = _detectors(values.get("detectors", {}))
    problems += wrong
    return (None, problems) if problems else (Settings(**found), [])


def _detectors(given: Any) -> tuple[dict[str, DetectorSection | None], list[Problem]]:
    if not isinstance(given, dict):
        return {}, [Problem(("detectors",), "expected a table for each detector")]
    found, problems = {}, []
    for name, keys in given.items():
        own = plain(keys) if isinstance(keys, Text) else keys
        if isinstance(own, dict):
            own = {"strategy": _default_strategy(name).value, **own}
        found[name], wrong = read(DetectorSection, own, ("detectors", name))
        problems += wrong
    return found, problems


def _default_strategy(detector: str) -> Strategy:
    return Strategy.ACT if detector in ACTING else Strategy.OBSERVE


def _overlaid(
    values: dict[str, Any], named: dict[tuple[str, ...], str], file: Path | None
) -> dict[str, Any]:
    """``values`` with those of the environment in their place."""
    result = deepcopy(values)
    # A variable may state a whole table as JSON, and another one a key in it.
    for path, name in sorted(named.items(), key=lambda item: len(item[0])):
        place: Any = result
        for depth, part in enumerate(path[:-1], start=1):
            if isinstance(place.get(part), Text):
                place[part] = plain(place[part])
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                key = ".".join(path[:depth])
                why = f"expected a table of keys, as {name} sets one in it"
                raise ConfigError(printable(f"{file or 'configuration'}: {key}: {why}"))
        place[path[-1]] = Text(os.environ[name])
    return result


def variables() -> dict[tuple[str, ...], str]:
    """Variables that set a key: path of the key -> name of the variable."""
    found = {}
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and "__" in name:
            key = tuple(part.lower() for part in name[len(ENV_PREFIX) :].split("__"))
            found[key] = name
    return found


def _explain(problem: Problem, file: Path | None, values: dict[str, Any]) -> str:
    where = problem.where
    named = variables().get(where)
    in_file = _contains(values, where)
    place = named or (str(file) if in_file else "configuration")  # the variable wins
    key = f"[{'.'.join(where[:-1])}] {where[-1]}" if len(where) > 1 else ".".join(where)
    if not problem.message:
        return f"{place}: unknown key {key}{nearest(where[-1], _known(where[:-1]))}"
    return f"{place}: {key}: {problem.message}"


def _contains(values: Any, where: tuple[str, ...]) -> bool:
    for part in where:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _known(section: tuple[str, ...]) -> tuple[str, ...]:
    if not section:
        return Settings.__struct_fields__
    kind = SECTIONS.get(section[0])
    return kind.__struct_fields__ if kind else ()


def nearest(word: str, known: Any) -> str:
    """The end of a sentence about an unknown ``word``: the nearest of ``known``, or all of them."""
    if near := difflib.get_close_matches(word, list(known), n=1):
        return f"; did you mean '{near[0]}'?"
    return f"; known are {', '.join(sorted(known))}" if known else ""


def _own_address() -> str:
    """The address of the default route; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])

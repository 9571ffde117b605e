"""The configuration: one TOML file, overlaid by ``TMD_<SECTION>__<KEY>`` variables.

Each key is documented where it is declared. Unknown keys are errors that name the file, the key
and the nearest known one. Nothing here has an effect; secrets are read when they are asked for.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import os
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tmd.core.errors import ConfigError
from tmd.core.model import Strategy
from tmd.sections import (
    MIN_SECRET,
    BreakerSection,
    DetectorSection,
    Http,
    LimitsSection,
    Policies,
    Section,
    Shadow,
    Triage,
    Webhook,
    read_secret,
)

ENV_PREFIX = "TMD_"
ENV_FILE = "TMD_CONFIG"
DEFAULT_FILE = Path("/etc/tmd/tmd.toml")
_SOCKET_PATH_LIMIT = 100


class Cluster(Section):
    name: str = Field(default="default", pattern=r"^[A-Za-z0-9_.-]+$")
    """Clusters of different names share a Redis without seeing each other."""
    secret: SecretStr | None = None
    """Keys of all jobs' links derive from it. Better in TMD_CLUSTER__SECRET or secret_file."""
    secret_file: Path | None = None
    """File with the secret; must not be readable by others."""


class Redis(Section):
    url: str | None = None
    """redis://, rediss://, unix:// or redis+sentinel://host:port,host:port/service/db."""
    timeout_s: float = Field(default=2.0, gt=0)
    """Longest wait for one answer."""


class Host(Section):
    name: str = Field(default_factory=socket.gethostname, pattern=r"^[^/|\s]+$")
    """Unique in the cluster."""
    standby: bool = False
    """Workers here start as standbys and never get a rank when a job forms."""
    advertise: str = Field(default_factory=lambda: _own_address())
    """Address at which workers here accept links of their peers."""
    runtime_dir: Path = Field(default_factory=lambda: _default_dir("RUNTIME_DIRECTORY"))
    """Folder of the socket, unless ``socket`` says otherwise."""
    socket: Path = Path()
    """Unix socket for trainers and launchers; default runtime_dir/tmd.sock."""
    state_dir: Path = Field(default_factory=lambda: _default_dir("STATE_DIRECTORY"))
    """What must survive a restart: the highest lease epochs obeyed."""
    users: tuple[str, ...] = ()
    """Users, besides root and the daemon's own, whose trainers may connect."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Period of the host's heartbeat; what cannot wait is told at once."""
    ttl_s: float = Field(default=3.0, gt=0)
    """A host not heard from for so long is silent."""

    @model_validator(mode="before")
    @classmethod
    def _place_socket(cls, values: dict[str, Any]) -> dict[str, Any]:
        if isinstance(values, dict) and "socket" not in values:
            folder = values.get("runtime_dir") or _default_dir("RUNTIME_DIRECTORY")
            return {**values, "socket": Path(folder) / "tmd.sock"}
        return values

    @model_validator(mode="after")
    def _check(self) -> Host:
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_LIMIT:
            raise ValueError(f"socket path {self.socket} is too long; choose a shorter runtime_dir")
        if self.ttl_s < 2 * self.heartbeat_s:
            raise ValueError("ttl_s must be at least twice heartbeat_s")
        return self


class Leader(Section):
    candidate: bool = True
    """Whether this daemon may lead."""
    ttl_s: float = Field(default=9.0, gt=0)
    """A dead leader is replaced after at most so long."""
    renew_s: float = Field(default=3.0, gt=0)
    """Period of renewal."""
    poll_s: float = Field(default=1.0, gt=0)
    """Everything is read again after so long even if no wake-up came."""

    @model_validator(mode="after")
    def _check(self) -> Leader:
        if 2 * self.renew_s > self.ttl_s:
            raise ValueError("ttl_s must be at least twice renew_s")
        return self

    @property
    def answer_s(self) -> float:
        """Longest wait for the store in a renewal, so that one lost answer never costs the lease:
        renew + 2 * answer <= ttl."""
        return (self.ttl_s - self.renew_s) / 2


class Plugins(Section):
    allow: tuple[str, ...] = ()
    """If not empty, only these are loaded."""
    deny: tuple[str, ...] = ()
    """These are never loaded."""


class Log(Section):
    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"


class _Env(EnvSettingsSource):
    """Only names with a section: ``TMD_SOCKET`` and the like belong to the trainers."""

    def _load_env_vars(self) -> dict[str, str | None]:
        found = super()._load_env_vars()
        return {k: v for k, v in found.items() if "__" in k and k.lower().startswith("tmd_")}


class Settings(BaseSettings):
    """All of it. Use :func:`load`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    cluster: Cluster = Cluster()
    redis: Redis = Redis()
    host: Host = Field(default_factory=lambda: Host())
    leader: Leader = Leader()
    limits: LimitsSection = LimitsSection()
    shadow: Shadow = Shadow()
    policies: Policies = Policies()
    plugins: Plugins = Plugins()
    breaker: BreakerSection = BreakerSection()
    triage: Triage = Triage()
    detectors: dict[str, DetectorSection] = {}
    http: Http = Http()
    webhook: Webhook = Webhook()
    log: Log = Log()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (_Env(settings_cls), init_settings)

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
        text = given.get_secret_value() if given else ""
        if given is None and file is not None:
            text = read_secret(file, "[cluster] secret_file")
        if len(text) < MIN_SECRET:
            raise ConfigError(
                f"the cluster secret has {len(text)} characters, at least {MIN_SECRET} are needed: "
                "set TMD_CLUSTER__SECRET or [cluster] secret_file, "
                "for example to the output of 'openssl rand -hex 32'"
            )
        return text.encode()

    def job_keys(self) -> Callable[[str], bytes]:
        """The function job -> key of its links. Reads the secret now."""
        secret, cluster = self.secret(), self.cluster.name
        return lambda job: hmac.digest(secret, f"{cluster}/{job}".encode(), hashlib.sha256)

    def detector(self, name: str) -> DetectorSection:
        """Settings of one detector; a stranger only observes until it is told otherwise."""
        acting = {"trainer"}
        given = self.detectors.get(name, DetectorSection())
        if name in acting and "strategy" not in given.model_fields_set:
            return given.model_copy(update={"strategy": Strategy.ACT})
        return given


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
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def load(path: Path | None = None) -> Settings:
    """The validated settings.

    Raises:
        ConfigError: names the place, the key and the remedy; several lines if several are wrong.
    """
    file = find_file(path)
    values = read_file(file)
    _check_variables()
    try:
        return Settings(**values)
    except ValidationError as error:
        lines = [_explain(dict(problem), file, values) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def variables() -> dict[tuple[str, ...], str]:
    """Variables that set a key: path of the key -> name of the variable."""
    found = {}
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and "__" in name:
            key = tuple(part.lower() for part in name[len(ENV_PREFIX) :].split("__"))
            found[key] = name
    return found


def _check_variables() -> None:
    for key, name in variables().items():
        if key[0] not in Settings.model_fields:
            raise ConfigError(f"{name}: unknown section{_nearest(key[0], Settings.model_fields)}")


def _explain(problem: dict[str, Any], file: Path | None, values: dict[str, Any]) -> str:
    where = tuple(str(part) for part in problem["loc"])
    named = variables().get(where)
    in_file = _contains(values, where)
    place = named if named and not in_file else str(file) if in_file else "configuration"
    key = f"[{'.'.join(where[:-1])}] {where[-1]}" if len(where) > 1 else ".".join(where)
    if problem["type"] == "extra_forbidden":
        return f"{place}: unknown key {key}{_nearest(where[-1], _known(where[:-1]))}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{place}: {key}: {message[:1].lower()}{message[1:]}"


def _contains(values: Any, where: tuple[str, ...]) -> bool:
    for part in where:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _known(section: tuple[str, ...]) -> list[str]:
    if not section:
        return list(Settings.model_fields)
    field = Settings.model_fields.get(section[0])
    model = field.annotation if field else None
    return (
        list(model.model_fields) if isinstance(model, type) and issubclass(model, Section) else []
    )


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known are {', '.join(sorted(known))}" if known else ""


def _default_dir(variable: str) -> Path:
    """As systemd says; else the usual place of root or of the user."""
    if os.environ.get(variable):
        return Path(os.environ[variable].split(":")[0])
    runtime = variable == "RUNTIME_DIRECTORY"
    if os.geteuid() == 0:
        return Path("/run/tmd" if runtime else "/var/lib/tmd")
    if runtime:
        return Path(os.environ.get("XDG_RUNTIME_DIR", f"/tmp/tmd-{os.getuid()}")) / "tmd"
    return Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local/state")) / "tmd"


def _own_address() -> str:
    """The address of the default route; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])

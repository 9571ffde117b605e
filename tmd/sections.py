"""Sections of the configuration: settings of decisions, and of connections to the outside.

Used through :mod:`tmd.config`; each key is documented where it is declared.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta, structs

from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.findings import FindingRules
from tmd.core.values.errors import ConfigError
from tmd.core.values.limits import PlanLimits, ShadowGoals, ShadowLimits
from tmd.core.values.model import Strategy
from tmd.core.values.names import wrong_plain
from tmd.core.values.numbers import Count, NotNegative, Positive
from tmd.core.values.reasons import in_words, os_reason
from tmd.schema import MASK, Invalid, Secret, Section

MIN_SECRET = 16
_LIMITS = PlanLimits()
_SHADOW = ShadowLimits()
_BREAKER = BreakerRules()


class LimitsSection(Section, frozen=True):
    prepare_s: Positive = _LIMITS.prepare_s
    """Longest preparation of a joiner in a planned move."""
    ready_s: Positive = _LIMITS.ready_s
    """Longest time until all members have armed and switched."""
    switch_s: Positive = _LIMITS.switch_s
    """Longest time from the switch to the joiner's first commit."""
    sync_s: Positive = _LIMITS.sync_s
    """Longest copy of a state after a loss."""
    settle_s: NotNegative = _LIMITS.settle_s
    """If members are stuck and no worker died, wait this long for evidence, then run on."""
    unheard_s: NotNegative = _LIMITS.unheard_s
    """A worker that a policy names as lost, and of whose host the leader hears nothing, is replaced
    only after this long: after an outage of Redis, hosts that are well have to report first."""
    silent_s: Positive = _LIMITS.silent_s
    """In a recovery, a worker that stays silent this long is presumed dead. A planned move waits
    as long for a joiner whose daemon restarts."""
    abandon_s: Positive = _LIMITS.abandon_s
    """The job has failed if all hosts of its members are up and, for this long, know none of its
    workers."""
    hold_s: NotNegative = _LIMITS.hold_s
    """Longest wait for a standby after a loss. 0 means no limit."""

    def limits(self) -> PlanLimits:
        return PlanLimits(**structs.asdict(self))


class ShadowSection(Section, frozen=True):
    enabled: bool = _SHADOW.enabled
    """A joiner shadows its rank before a planned switch. Otherwise the state is copied at the
    switch while all ranks wait."""
    mirror: Literal["auto", "gradients"] = _SHADOW.mirror
    """What a rank sends to the joiner of a planned move. ``auto``: the outputs of its collectives,
    from which the joiner computes each step. If these exceed half of the link, and the gradients
    are at most half as large, only the gradients, on which the joiner runs the optimizer.
    ``gradients``: always the gradients."""
    copy_mb_s: Positive = _SHADOW.copy_mb_s
    """Megabytes per second at which a state is copied while its rank trains."""
    staging_mb: Positive = _SHADOW.staging_mb
    """Megabytes of host memory on each side for frames that the other side has not taken yet."""
    lag: Positive = _SHADOW.lag
    """Part of a step by which a shadow that is in step may be late."""
    patience_s: Positive = _SHADOW.patience_s
    """Longest time from the arrival of the state until the shadow is in step. Then another standby
    is tried."""

    hot: Annotated[int, Meta(ge=0)] = 0
    """Number of standbys of each job that shadow a rank all the time. The loss of such a rank
    needs no copy."""
    finish_steps: bool = _SHADOW.finish_steps
    """A step in the middle of which such a rank is lost is finished, if it can be. Otherwise it is
    repeated. Costs a copy of the inputs of collectives while a standby is hot, large all-reduces
    excepted."""
    rehearse: bool = True
    """Every standby rehearses one rank of each role once. A standby that computes other bits gets
    no rank."""

    def limits(self) -> ShadowLimits:
        keys = ShadowLimits.__struct_fields__
        return ShadowLimits(**{key: getattr(self, key) for key in keys})

    def goals(self) -> ShadowGoals:
        if not self.enabled:
            return ShadowGoals()
        return ShadowGoals(hot=self.hot, rehearse=self.rehearse)


class Policies(Section, frozen=True):
    """``[policies]``, and a table ``[policies.<name>]`` with the own keys of each policy."""

    enabled: tuple[str, ...] = ("replace_failed", "drain_requested")
    """Names of policies, as ``tmd plugins`` lists them, in the order in which they are asked."""
    own: dict[str, dict[str, Any]] = {}
    """Keys of the policies themselves, in tables ``[policies.NAME]``."""

    def __post_init__(self) -> None:
        for key, value in self.own.items():
            if not isinstance(value, dict):
                raise Invalid(f"unknown key '{key}'; the only one is 'enabled'")


class BreakerSection(Section, frozen=True):
    hosts_percent: Annotated[float, Meta(gt=0, le=100)] = 100 * _BREAKER.hosts_share
    """The breaker opens if this percentage of all hosts, and at least two, raise grave findings
    at once."""
    window_s: Positive = _BREAKER.window_s
    """Window of time for that."""
    moves: Count = _BREAKER.moves
    """The breaker also opens after more moves by policies than this within ``moves_window_s``."""
    moves_window_s: Positive = _BREAKER.moves_window_s
    """Window of time for that."""
    same_within_s: NotNegative = _BREAKER.same_within_s
    """The same finding on two hosts within this time moves no rank."""
    settle_s: NotNegative = _BREAKER.settle_s
    """A finding about a host moves no rank before it is this old, so that others can report."""

    def rules(self) -> BreakerRules:
        values = structs.asdict(self)
        return BreakerRules(hosts_share=values.pop("hosts_percent") / 100, **values)


class DetectorSection(Section, frozen=True):
    """``[detectors.<name>]``: these keys and the detector's own."""

    enabled: bool = True
    """Whether the detector runs."""
    strategy: Strategy = Strategy.OBSERVE
    """How far its findings go: ``observe`` alerts people, ``advise`` also counts for the breaker,
    ``act`` lets policies move ranks. ``act`` is the default of the detector ``trainer``."""
    hold_s: NotNegative = 0.0
    """A finding must persist this long before it is raised."""
    own: dict[str, Any] = {}
    """Keys for the detector itself."""


class Triage(Section, frozen=True):
    repeats: Annotated[int, Meta(ge=0)] = 3
    """After this many raises of a finding about the host within the window, a warning becomes
    degraded, and a host whose detector may act gets no rank. 0 means never."""
    window_h: Positive = 168.0
    """The window, in hours."""

    def rules(self, detector: DetectorSection) -> FindingRules:
        return FindingRules(detector.hold_s, self.repeats, self.window_h * 3600)


class InjectSection(Section, frozen=True):
    enabled: bool = False
    """Whether ``tmd inject`` may raise findings here that no detector made. Every user who may use
    the socket of the daemon may then do so, and policies act on them."""


class Http(Section, frozen=True):
    listen: str = ""
    """host:port for health, metrics, state and the page. A port alone means the loopback, empty
    means none. Everybody who can connect can read."""
    names: tuple[str, ...] = ()
    """Further names in a Host header that are accepted, such as the name by which a proxy or
    Prometheus asks. The host name, the advertised name and those of the loopback are always
    accepted; a GET may also use any IP address."""
    token_file: Path | None = None
    """File with the bearer token of requests that change something. Without it they are refused.
    Others must not be able to read it."""

    def __post_init__(self) -> None:
        try:
            place(self.listen)
        except ValueError as error:
            raise Invalid(in_words(error), "listen") from None
        for number, name in enumerate(self.names, start=1):
            if wrong := wrong_plain(name):
                raise Invalid(f"entry {number}: {wrong}; without a port", "names")

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port, or ``None`` if nothing is to be served."""
        return place(self.listen)

    def token(self) -> Secret | None:
        """The token; read now.

        Raises:
            ConfigError: the file cannot be used.
        """
        if self.token_file is None:
            return None
        token = read_secret(self.token_file, "[http] token_file")
        if len(token) < MIN_SECRET or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"[http] token_file {self.token_file}: at least {MIN_SECRET} printable ASCII "
                "characters are needed, for example the output of 'openssl rand -hex 32'"
            )
        return Secret(token)


class WebhookSection(Section, frozen=True):
    url: Secret | None = None
    """The leader POSTs JSON here; Slack's incoming webhooks understand it. The URL is a secret."""
    headers: dict[str, Secret] = {}
    """Headers of the request, for example Authorization. They are secrets, too."""
    events: tuple[Literal["alerts", "migrations"], ...] = ("alerts", "migrations")
    """What is sent: ``alerts`` as they are raised and cleared, ``migrations`` when they have
    ended."""
    timeout_s: Positive = 5.0
    """Longest wait for one answer. Then the request is sent again."""

    def __post_init__(self) -> None:
        if self.url is not None and not _is_web(self.url.reveal()):
            raise Invalid("it must begin with http:// or https:// and name a host", "url")
        for name, value in self.headers.items():
            if not name.isascii() or not (name + value.reveal()).isprintable():
                message = f"header '{name[:40]}' has characters that HTTP does not allow"
                raise Invalid(message, "headers")


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


_SECRET_OPTION = r"\w*(?:password|secret|token)"


def without_password(url: str) -> str:
    """``url`` as it may be shown. A password may hold characters that would have to be quoted."""
    place, mark, options = url.partition("?")
    if "@" in options:  # of a login with a '?', or of an option: nobody can tell
        return f"{url.partition('//')[0]}//{MASK}"
    place = re.sub(r"//([^:@/]*:).*@", rf"//\1{MASK}@", place, flags=re.DOTALL)
    options = re.sub(rf"(\b{_SECRET_OPTION}=)[^&]*", rf"\1{MASK}", options)
    return place + mark + options


def place(listen: str) -> tuple[str, int] | None:
    """``host:port`` taken apart; the loopback if there is no host.

    Raises:
        ValueError: it is neither that nor empty.
    """
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise ValueError("write host:port, for example 127.0.0.1:7471, or a port alone")
    return host or "127.0.0.1", int(port)


def inline_secrets(values: dict[str, Any]) -> list[str]:
    """Keys of the configuration file ``values`` that hold a secret."""
    # The contents are unchecked: what should be a table may be anything.
    tables = {name: keys for name, keys in values.items() if isinstance(keys, dict)}
    redis = tables.get("redis", {}).get("url")
    webhook = tables.get("webhook", {})
    found = {
        "[cluster] secret": tables.get("cluster", {}).get("secret"),
        "[redis] url": isinstance(redis, str) and without_password(redis) != redis,
        "[webhook] url": webhook.get("url"),
        "[webhook] headers": webhook.get("headers"),
    }
    return [key for key, secret in found.items() if secret]


def is_public(path: Path) -> bool:
    """Whether everybody may read ``path``: itself, and get there through each folder above."""
    try:
        place = path.resolve(strict=True)
        above = all(folder.stat().st_mode & 0o001 for folder in place.parents)
        return above and bool(place.stat().st_mode & 0o004)
    except OSError:
        return False


def read_secret(path: Path, key: str) -> str:
    """Contents of a file that others must not be able to read; ``key`` names it in errors. Bytes
    that are not UTF-8 become surrogates, as in variables of the environment.

    Raises:
        ConfigError: it cannot be read, or by everybody.
    """
    try:
        if path.stat().st_mode & 0o007:
            raise ConfigError(f"{path} can be read by everybody: chmod 640 {path}")
        return path.read_text("utf-8", errors="surrogateescape").strip()
    except OSError as error:
        raise ConfigError(f"{key} {path}: {os_reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{key} {str(path)!r}: {in_words(error)}") from error

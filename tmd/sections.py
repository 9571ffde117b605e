"""Sections of the configuration: what sets up decisions, and what speaks to the world outside.

Used through :mod:`tmd.config`; each key is documented where it is declared.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta, structs

from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.findings import Rules
from tmd.core.values.errors import ConfigError
from tmd.core.values.limits import PlanLimits, ShadowLimits, Understudies
from tmd.core.values.model import Strategy
from tmd.core.values.names import wrong_plain
from tmd.core.values.reasons import in_words, os_reason
from tmd.schema import MASK, Invalid, NotNegative, Positive, Secret, Section

MIN_SECRET = 16
_LIMITS = PlanLimits()
_SHADOW = ShadowLimits()
_BREAKER = BreakerRules()


class LimitsSection(Section, frozen=True):
    prepare_s: Positive = _LIMITS.prepare_s
    """Longest preparation of a joiner in a planned move."""
    ready_s: Positive = _LIMITS.ready_s
    """Longest time until all have armed and switched."""
    switch_s: Positive = _LIMITS.switch_s
    """Longest time from the switch to the joiner's first commit."""
    sync_s: Positive = _LIMITS.sync_s
    """Longest copy of a state after a loss."""
    settle_s: NotNegative = _LIMITS.settle_s
    """Members are stuck and nobody died: wait so long for evidence, then run on."""
    silent_s: Positive = _LIMITS.silent_s
    """In a recovery: who is not heard from for so long is taken for dead. And how long a joiner is
    waited for whose daemon is being started anew."""
    abandon_s: Positive = _LIMITS.abandon_s
    """Every member's host is there and knows nothing of its worker: the job has failed."""
    hold_s: NotNegative = _LIMITS.hold_s
    """Longest wait for a standby after a loss; 0 waits for ever."""

    def limits(self) -> PlanLimits:
        return PlanLimits(**structs.asdict(self))


class ShadowSection(Section, frozen=True):
    enabled: bool = _SHADOW.enabled
    """A joiner lives the life of its rank before a planned switch; else the state is copied at the
    switch, while all wait."""
    copy_mb_s: Positive = _SHADOW.copy_mb_s
    """Megabytes per second at which a state is copied while its rank trains."""
    staging_mb: Positive = _SHADOW.staging_mb
    """Host memory on each side for what the other has not taken yet."""
    lag: Positive = _SHADOW.lag
    """Part of a step by which a shadow that is in step may be behind."""
    patience_s: Positive = _SHADOW.patience_s
    """From the arrival of the state until it must be in step; then another standby is tried."""

    hot: Annotated[int, Meta(ge=0)] = 0
    """So many standbys of each job follow a rank all the time: its loss then needs no copy."""
    rehearse: bool = True
    """Every standby follows one rank of each kind once, until it has computed the same bits; who
    computes others is never given a rank."""

    def limits(self) -> ShadowLimits:
        keys = ShadowLimits.__struct_fields__
        return ShadowLimits(**{key: getattr(self, key) for key in keys})

    def understudies(self) -> Understudies:
        if not self.enabled:
            return Understudies()
        return Understudies(hot=self.hot, rehearse=self.rehearse)


class Policies(Section, frozen=True):
    """``[policies]``, and a table ``[policies.<name>]`` with the own keys of each policy."""

    enabled: tuple[str, ...] = ("replace_failed", "drain_requested")
    """Names as ``tmd plugins`` lists them; asked in this order."""
    own: dict[str, dict[str, Any]] = {}
    """Name of a policy -> keys for the policy itself."""

    def __post_init__(self) -> None:
        for key, value in self.own.items():
            if not isinstance(value, dict):
                raise Invalid(f"unknown key '{key}'; the only one is 'enabled'")


class BreakerSection(Section, frozen=True):
    hosts_percent: Annotated[float, Meta(gt=0, le=100)] = 100 * _BREAKER.hosts_share
    """So many hosts, and at least two, that raise grave findings at once open the breaker."""
    window_s: Positive = _BREAKER.window_s
    """What "at once" means for that."""
    moves: Annotated[int, Meta(ge=1)] = _BREAKER.moves
    """More moves by policies than this within their window open it as well."""
    moves_window_s: Positive = _BREAKER.moves_window_s
    """The window of moves."""
    same_within_s: NotNegative = _BREAKER.same_within_s
    """The same finding on two hosts within so long moves nobody."""
    settle_s: NotNegative = _BREAKER.settle_s
    """A finding about a host moves nobody before it is so old: others may be heard meanwhile."""

    def rules(self) -> BreakerRules:
        values = structs.asdict(self)
        return BreakerRules(hosts_share=values.pop("hosts_percent") / 100, **values)


class DetectorSection(Section, frozen=True):
    """``[detectors.<name>]``: these keys and the detector's own."""

    enabled: bool = True
    strategy: Strategy = Strategy.OBSERVE
    """How far its findings go: observe (recorded), advise (alert), act (policies may act; the
    default of the detector ``trainer``)."""
    hold_s: NotNegative = 0.0
    """A finding must hold for so long before it is raised."""
    own: dict[str, Any] = {}
    """Keys for the detector itself."""


class Triage(Section, frozen=True):
    repeats: Annotated[int, Meta(ge=0)] = 3
    """A finding about the host that is raised so often within the window: a warning becomes
    degraded, and a host whose detector may act gets no rank any more. 0 is never."""
    window_h: Positive = 168.0
    """The window, in hours."""

    def rules(self, detector: DetectorSection) -> Rules:
        return Rules(detector.hold_s, self.repeats, self.window_h * 3600)


class InjectSection(Section, frozen=True):
    enabled: bool = False
    """Whether 'tmd inject' may raise findings here that nobody has found. Whoever may use the
    daemon's socket may then do so, and policies act on them."""


class Http(Section, frozen=True):
    listen: str = ""
    """host:port for health, metrics, state and the page; a port alone means the loopback, empty
    means none. Whoever can connect can read."""
    names: tuple[str, ...] = ()
    """Further names in a Host header that mean this daemon, besides its host name, its addresses
    and those of the loopback: a name under which a proxy or Prometheus asks."""
    token_file: Path | None = None
    """File with the bearer token of requests that change something; without it they are refused.
    Must not be readable by others."""

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
    """Sent with it, for example Authorization."""
    events: tuple[Literal["alerts", "migrations"], ...] = ("alerts", "migrations")
    """What is told: alerts as they are raised and cleared, migrations when they have ended."""
    timeout_s: Positive = 5.0
    """Longest wait for one answer; then it is tried again."""

    def __post_init__(self) -> None:
        if self.url is not None and not _is_web(self.url.reveal()):
            raise Invalid("it must begin with http:// or https:// and name a host", "url")
        for name, value in self.headers.items():
            if not name.isascii() or not (name + value.reveal()).isprintable():
                said = f"header '{name[:40]}' has characters that HTTP does not allow"
                raise Invalid(said, "headers")


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def without_password(url: str) -> str:
    """``url`` as it may be shown. A password may hold characters that would have to be quoted."""
    shown = re.sub(r"//([^:@/]*:).*@", rf"//\1{MASK}@", url, flags=re.DOTALL)
    return re.sub(r"([?&](?:password|secret|token)=)[^&]*", rf"\1{MASK}", shown)


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
    redis = values.get("redis", {}).get("url")
    webhook = values.get("webhook", {})
    found = {
        "[cluster] secret": values.get("cluster", {}).get("secret"),
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
    """Contents of a file that others must not be able to read; ``key`` names it in errors.

    Raises:
        ConfigError: it cannot be read, or by everybody.
    """
    try:
        if path.stat().st_mode & 0o007:
            raise ConfigError(f"{path} can be read by everybody: chmod 640 {path}")
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{key} {path}: {os_reason(error)}") from error

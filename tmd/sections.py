"""Sections of the configuration: what sets up decisions, and what speaks to the world outside.

Used through :mod:`tmd.config`; each key is documented where it is declared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from tmd.core.breaker import BreakerRules
from tmd.core.errors import ConfigError
from tmd.core.findings import Rules
from tmd.core.limits import Limits, ShadowLimits, Understudies
from tmd.core.model import Strategy

MIN_SECRET = 16
_LIMITS = Limits()
_SHADOW = ShadowLimits()
_BREAKER = BreakerRules()


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class LimitsSection(Section):
    prepare_s: float = Field(default=_LIMITS.prepare_s, gt=0)
    """Longest preparation of a joiner in a planned move."""
    ready_s: float = Field(default=_LIMITS.ready_s, gt=0)
    """Longest time until all have armed and switched."""
    switch_s: float = Field(default=_LIMITS.switch_s, gt=0)
    """Longest time from the switch to the joiner's first commit."""
    sync_s: float = Field(default=_LIMITS.sync_s, gt=0)
    """Longest copy of a state after a loss."""
    settle_s: float = Field(default=_LIMITS.settle_s, ge=0)
    """Members are stuck and nobody died: wait so long for evidence, then run on."""
    silent_s: float = Field(default=_LIMITS.silent_s, gt=0)
    """In a recovery: who is not heard from for so long is taken for dead."""
    abandon_s: float = Field(default=_LIMITS.abandon_s, gt=0)
    """Every member's host is there and knows nothing of its worker: the job has failed."""
    hold_s: float = Field(default=_LIMITS.hold_s, ge=0)
    """Longest wait for a standby after a loss; 0 waits for ever."""

    def limits(self) -> Limits:
        return Limits(**self.model_dump())


class Shadow(Section):
    enabled: bool = _SHADOW.enabled
    """A joiner lives the life of its rank before a planned switch; else the state is copied at the
    switch, while all wait."""
    copy_mb_s: float = Field(default=_SHADOW.copy_mb_s, gt=0)
    """Megabytes per second at which a state is copied while its rank trains."""
    staging_mb: float = Field(default=_SHADOW.staging_mb, gt=0)
    """Host memory on each side for what the other has not taken yet."""
    lag: float = Field(default=_SHADOW.lag, gt=0)
    """Part of a step by which a shadow that is in step may be behind."""
    patience_s: float = Field(default=_SHADOW.patience_s, gt=0)
    """From the arrival of the state until it must be in step; then another standby is tried."""

    hot: int = Field(default=0, ge=0)
    """So many standbys of each job follow a rank all the time: its loss then needs no copy."""
    rehearse: bool = True
    """Every standby follows a rank once, until it has computed the same bits; who cannot is never
    given a rank."""

    def limits(self) -> ShadowLimits:
        return ShadowLimits(**self.model_dump(exclude={"hot", "rehearse"}))

    def understudies(self) -> Understudies:
        if not self.enabled:
            return Understudies()
        return Understudies(hot=self.hot, rehearse=self.rehearse)


class Policies(BaseModel):
    """``[policies]``, and a table ``[policies.<name>]`` with the own keys of each policy."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    enabled: tuple[str, ...] = ("replace_failed", "drain_requested")
    """Names as ``tmd plugins`` lists them; asked in this order."""

    @model_validator(mode="after")
    def _check(self) -> Policies:
        for key, value in (self.model_extra or {}).items():
            if not isinstance(value, dict):
                raise ValueError(f"unknown key '{key}'; the only one is 'enabled'")
        return self

    @property
    def own(self) -> dict[str, dict[str, Any]]:
        """Keys for the policies themselves."""
        return dict(self.model_extra or {})


class BreakerSection(Section):
    hosts_percent: float = Field(default=100 * _BREAKER.hosts_share, gt=0, le=100)
    """So many hosts, and at least two, that raise grave findings at once open the breaker."""
    window_s: float = Field(default=_BREAKER.window_s, gt=0)
    """What "at once" means for that."""
    moves: int = Field(default=_BREAKER.moves, ge=1)
    """More moves by policies than this within their window open it as well."""
    moves_window_s: float = Field(default=_BREAKER.moves_window_s, gt=0)
    """The window of moves."""
    same_within_s: float = Field(default=_BREAKER.same_within_s, ge=0)
    """The same finding on two hosts within so long moves nobody."""
    settle_s: float = Field(default=_BREAKER.settle_s, ge=0)
    """A finding about a host moves nobody before it is so old: others may be heard meanwhile."""

    def rules(self) -> BreakerRules:
        values = self.model_dump(exclude={"hosts_percent"})
        return BreakerRules(hosts_share=self.hosts_percent / 100, **values)


class DetectorSection(BaseModel):
    """``[detectors.<name>]``: these keys and the detector's own."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    enabled: bool = True
    strategy: Strategy = Strategy.OBSERVE
    """How far its findings go: observe (recorded), advise (alert), act (policies may act)."""
    hold_s: float = Field(default=0.0, ge=0)
    """A finding must hold for so long before it is raised."""

    @property
    def own(self) -> dict[str, Any]:
        """Keys for the detector itself."""
        return dict(self.model_extra or {})


class Triage(Section):
    repeats: int = Field(default=3, ge=0)
    """A finding about the host that is raised so often within the window: a warning becomes
    degraded, and a host whose detector may act gets no rank any more. 0 is never."""
    window_h: float = Field(default=168.0, gt=0)
    """The window, in hours."""

    def rules(self, detector: DetectorSection) -> Rules:
        return Rules(detector.hold_s, self.repeats, self.window_h * 3600)


class Http(Section):
    listen: str = ""
    """host:port for health, metrics, state and the page; a port alone means the loopback, empty
    means none. Whoever can connect can read."""
    token_file: Path | None = None
    """File with the bearer token of requests that change something; without it they are refused.
    Must not be readable by others."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, listen: str) -> str:
        place(listen)
        return listen

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port, or ``None`` if nothing is to be served."""
        return place(self.listen)

    def token(self) -> str | None:
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
        return token


class Webhook(Section):
    url: SecretStr | None = None
    """The leader POSTs JSON here; Slack's incoming webhooks understand it. The URL is a secret."""
    headers: dict[str, SecretStr] = {}
    """Sent with it, for example Authorization."""
    events: tuple[Literal["alerts", "migrations"], ...] = ("alerts", "migrations")
    """What is told: alerts as they are raised and cleared, migrations when they have ended."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Longest wait for one answer; then it is tried again."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            # The message must not contain the value: it is shown.
            try:
                parts = urlsplit(url.get_secret_value())
                usable = parts.scheme in ("http", "https") and bool(parts.hostname)
            except ValueError:
                usable = False
            if not usable:
                raise ValueError("it must begin with http:// or https:// and name a host")
        return url

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in headers.items():
            if not name.isascii() or not (name + value.get_secret_value()).isprintable():
                raise ValueError(f"header '{name[:40]}' has characters that HTTP does not allow")
        return headers


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
        raise ConfigError(f"{key} {path}: {error.strerror}") from error

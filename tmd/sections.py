"""Sections of the configuration that speak to people and programs outside the cluster.

Each key is documented where it is declared; :mod:`tmd.config` puts the sections together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from tmd.core.errors import ConfigError

MIN_SECRET = 16


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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

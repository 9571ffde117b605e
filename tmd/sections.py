"""Sections of the configuration that speak to people and programs outside the cluster.

Each key is documented where it is declared; :mod:`tmd.config` puts the sections together.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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

"""Removes secrets from texts that leave the cluster. Pure.

Known secrets are removed wherever they stand. What only looks like a secret is removed as well: a
text may hold one of another program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct, structs

from tmd.core.values.errors import ConfigError
from tmd.schema import MASK, Secret

if TYPE_CHECKING:
    from tmd.config import Settings

SHORTEST = 6
"""Shorter words are no secrets, and removing them would remove other text."""
# Each repetition is bounded: a long line must not take for ever.
_LOOKS = (
    (re.compile(r"(?s)-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.{0,9000}?(-----END|\Z)"), MASK),
    # A password in an address, also one with characters that would have to be quoted.
    (re.compile(r"(\w://[^\s:@/\"']{0,100}:)[^\s\"']{0,500}@"), rf"\1{MASK}@"),
    # Variables of tmd in units and environments; what the value is, the configuration shows.
    (re.compile(r"(\bTMD_\w{1,80}=)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)"), rf"\1{MASK}"),
    (re.compile(r"(?i)(\bauthorization\b[\"']?\s{0,9}[:=]\s{0,9}).*"), rf"\1{MASK}"),
    (re.compile(r"(?i)(\bbearer\s{1,9})[\w.~+/=-]+"), rf"\1{MASK}"),
    (
        re.compile(
            r"(?i)((?:password|passwd|secret|token|api[_-]?key|credential|private[_-]?key)"
            r"(?!\w{0,40}_file)\w{0,40}[\"']?\s{0,9}[:=]\s{0,9})"
            r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s,}\]\"']+)"
        ),
        rf'\1"{MASK}"',
    ),
)


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """``text`` without ``secrets`` and what looks like one."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, instead in _LOOKS:
        text = pattern.sub(instead, text)
    return text


def secrets_of(settings: Settings) -> frozenset[str]:
    """Every secret that the configuration names, in each form in which a text may hold it."""
    words = [*_revealed(settings), *_from_files(settings), *_of_url(settings.redis.url or "")]
    if settings.webhook.url is not None:
        words += urlsplit(settings.webhook.url.reveal()).path.split("/")
    parts = [part for word in words for part in (word, *word.split())]
    forms = {form for part in parts for form in (part, quote(part, safe=""), unquote(part))}
    return frozenset(form for form in forms if len(form) >= SHORTEST)


def _revealed(value: Any) -> Iterator[str]:
    """All values of the type :class:`Secret` in ``value``."""
    if isinstance(value, Secret):
        yield value.reveal()
    elif isinstance(value, Struct):
        yield from _revealed(structs.asdict(value))
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _revealed(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _revealed(inner)


def _from_files(settings: Settings) -> Iterator[str]:
    for read in (lambda: settings.secret().decode(), lambda: settings.http.token()):
        try:
            found = read()
        except (ConfigError, UnicodeDecodeError):
            continue  # not readable here, so no text that is written here quotes it
        if found is not None:
            yield found.reveal() if isinstance(found, Secret) else found


def _of_url(url: str) -> Iterator[str]:
    """The password of ``url``, which may hold characters that would have to be quoted."""
    inside = re.search(r"//[^:@/]*:(.*)@", url, flags=re.DOTALL)
    yield from [] if inside is None else [inside[1]]
    yield from re.findall(r"[?&](?:password|secret|token)=([^&]*)", url)

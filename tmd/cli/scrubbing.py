"""Removes secrets from texts that leave the cluster. Pure.

Known secrets are removed wherever they stand. What only looks like a secret is removed as well: a
text may hold one of another program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct, structs

from tmd.core.values.errors import ConfigError
from tmd.schema import MASK, Secret

if TYPE_CHECKING:
    from tmd.config import Settings

SHORTEST = 6
"""Shorter words are no secrets, and removing them would remove other text."""
_NAME = (
    r"(?:password|passwd|passphrase|passcode|(?<![a-z])pass(?![a-z])|secret|token|api[_-]?key|"
    r"access[_-]?key|credential|private[_-]?key)(?![\w-]{0,40}[_-]file)[\w-]{0,40}"
)
"""A word that names a secret."""
_QUOTE = r"\\{0,4}[\"']"
"""Also one that is escaped, since the text is a string of JSON."""
# Also with a quote or backslash inside.
_WORD = r"(?:[^\s\"'\\]|[\"'\\](?=[\w$%&*+/@#!.-]))"
_VALUE = (
    r"(?:\"{3}[\s\S]*?(?:\"{3}|\Z)|'{3}[\s\S]*?(?:'{3}|\Z)"
    r"|\[[^\]\n]{0,2000}\]"
    r"|\\{1,4}\"[^\n]{0,2000}?\\{1,4}\"(?!\w)"
    rf"|(?:\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')(?:(?=\w){_WORD}+)?"
    rf"|[^\s\"'\\]{_WORD}*|[\"'][^\n]*)"
)
"""Over several lines in TOML, a list, escaped and quoted, quoted, all up to the next space or
closing quote, or quoted without an end."""
_ARGUMENT = rf"(?:\\{{1,4}}\"[^\"\\\n]*\\{{1,4}}\"|\"(?:\\.|[^\"\\\n])*\"|[^\s\"'\\]{_WORD}*)"
"""Of a command of Redis, as its log and its clients show it."""
_KEY = re.compile(rf"(?i){_NAME}$")
_FLAG = re.compile(rf"(?i)--?[\w-]{{0,40}}{_NAME}$")
# Each repetition is bounded or ends with its line: a long line must not take for ever.
_LOOKS = (
    # One without an end is masked to the end of the text.
    (
        re.compile(
            r"(?s)-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
            r"(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
        ),
        MASK,
    ),
    # A password in an address, also one with characters that would have to be quoted.
    (re.compile(r"(\w://[^\s:@/\"']{0,100}:)[^\s\"']{0,500}@"), rf"\1{MASK}@"),
    # A user without a password may be a token.
    (re.compile(r"(\w://)[^\s:@/\"'*]{1,500}@"), rf"\1{MASK}@"),
    (
        re.compile(r"(?i)([?&;][\w-]{0,40}(?:sig|signature|key|auth|code)=)[^&\s\"'#\\]+"),
        rf"\1{MASK}",
    ),
    # Variables of tmd in units and environments; what the value is, the configuration shows.
    (re.compile(r"(\bTMD_\w{1,80}=)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)"), rf"\1{MASK}"),
    (
        re.compile(rf"(?i)(\b(?:authorization|(?:set-)?cookie){_QUOTE}?\s{{0,9}}[:=]).*"),
        rf"\1{MASK}",
    ),
    (re.compile(r"(?i)(\bbearer\s{1,9})[\w.~+/=-]+"), rf"\1{MASK}"),
    # Of Redis: in its configuration, and in what a client sends.
    (
        re.compile(
            rf"(?i)(\b(?:requirepass|masterauth|auth-pass\s{{1,9}}\S{{1,100}})\s{{1,9}}){_VALUE}"
        ),
        rf"\1{MASK}",
    ),
    # In small letters the word is one of a sentence, unless it is quoted.
    (
        re.compile(
            rf"((?:\bAUTH{_QUOTE}?|{_QUOTE}(?i:auth){_QUOTE})\s{{1,9}})"
            rf"(?:{_ARGUMENT}[^\S\n]{{1,9}})?{_ARGUMENT}"
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(rf"(\bredis-cli\b[^\n]{{0,300}}?[\s\"']-a{_QUOTE}?[\s,]{{1,9}}){_VALUE}"),
        rf'\1"{MASK}"',
    ),
    # An argument of a command, in a line or in a list.
    (
        re.compile(
            rf"(?i)((?<![\w-])--?[\w-]{{0,40}}{_NAME}{_QUOTE}?(?:\s{{0,9}},\s{{0,9}}|\s{{1,9}}))"
            rf"(?!{_QUOTE}?-){_VALUE}"
        ),
        rf'\1"{MASK}"',
    ),
    (
        re.compile(
            rf"((?<![\w-])(?:-u|--user){_QUOTE}?[\s,=]{{1,9}}{_QUOTE}?[^\s:\"']{{1,100}}:)[^\s\"']+"
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(rf"(?i)({_NAME}{_QUOTE}?\s{{0,9}}[:=]{{1,2}}>?\s{{0,9}}){_VALUE}"),
        rf'\1"{MASK}"',
    ),
    # What programs give out as tokens, without a name beside it.
    (
        re.compile(
            r"\b(?:gh[pousr]_[A-Za-z0-9]{10,}|github_pat_\w{10,}|hf_[A-Za-z0-9]{10,}|"
            r"(?:AKIA|ASIA)[A-Z0-9]{12,}|glpat-[\w-]{10,}|xox[a-z]-[\w-]{10,}|sk-[\w-]{20,}|"
            r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        MASK,
    ),
)
_ACL_LINE = re.compile(rf"(?i)\b(?:set)?user{_QUOTE}?[\s,]+\S+\s")
"""A line about a user of Redis: passwords and their digests begin with a sign."""
_ACL_PASSWORD = re.compile(r"(?<=\")[>#](?:\\.|[^\"\\\n])+(?=\")|(?<=[\s\"'])[>#][^\s\"']+")


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """``text`` without ``secrets`` and what looks like one."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, instead in _LOOKS:
        text = pattern.sub(instead, text)
    return "".join(
        _ACL_PASSWORD.sub(MASK, line) if _ACL_LINE.search(line) else line
        for line in text.splitlines(keepends=True)
    )


def scrubbed_value(value: Any, secrets: Collection[str]) -> Any:
    """``value`` of JSON with every text scrubbed: before it is encoded, so that no escape hides
    anything, and the result can be decoded."""
    if isinstance(value, str):
        return scrubbed(value, secrets)
    if isinstance(value, dict):
        return {
            # Keys are tmd's own words, and a secret may be one of them.
            scrubbed(key, ()): MASK
            if isinstance(inner, str) and _KEY.search(key)
            else scrubbed_value(inner, secrets)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        hidden = set(_after_flags(value))
        return [
            MASK if isinstance(inner, str) and inner in hidden else scrubbed_value(inner, secrets)
            for inner in value
        ]
    return value


def secrets_of(settings: Settings) -> frozenset[str]:
    """Every secret that the configuration names, in each form in which a text may hold it."""
    words = [*_revealed(settings), *_from_files(settings), *_of_url(settings.redis.url or "")]
    words += _of_commands(structs.asdict(settings))
    if settings.webhook.url is not None:
        path = urlsplit(settings.webhook.url.reveal()).path
        words += filter(_looks_random, path.split("/"))
    parts = [part for word in words for part in (word, *word.split())]
    forms = {form for part in parts for form in (part, quote(part, safe=""), unquote(part))}
    once = {json.dumps(form)[1:-1] for form in forms}
    twice = {json.dumps(form)[1:-1] for form in once}
    return frozenset(form for form in forms | once | twice if len(form) >= SHORTEST)


def _looks_random(word: str) -> bool:
    """Whether a part of an address is a secret rather than a name such as ``services``."""
    return len(word) >= 16 or (len(word) >= 8 and any(map(str.isdigit, word)))


def _of_commands(value: Any) -> Iterator[str]:
    """Arguments after a flag that names a secret, in each list of ``value``."""
    if isinstance(value, Struct):
        value = structs.asdict(value)
    if isinstance(value, dict):
        for inner in value.values():
            yield from _of_commands(inner)
    elif isinstance(value, list | tuple):
        yield from _after_flags(value)
        for inner in value:
            yield from _of_commands(inner)


def _after_flags(words: Sequence[Any]) -> Iterator[str]:
    of_redis = any(isinstance(word, str) and word.endswith("redis-cli") for word in words)
    for flag, word in pairwise(words):
        texts = isinstance(flag, str) and isinstance(word, str)
        if texts and (_FLAG.fullmatch(flag) or (of_redis and flag == "-a")):
            yield word


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
    yield from re.findall(r"[?&]\w*(?:password|secret|token)=([^&]*)", url)

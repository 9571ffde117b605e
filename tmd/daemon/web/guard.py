"""Who may change something over HTTP. Pure: facts of a request in, a refusal or nothing out.

A browser on the operator's machine can be made to send requests by any page it shows. It cannot
send the token, and besides, what comes from another origin, or by a name that is not ours (DNS
rebinding), is refused.
"""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from msgspec import Struct

from tmd.schema import Secret

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class RequestProblem(Struct, frozen=True):
    """An error as the client gets it."""

    status: int
    code: str
    message: str


class Asked(Struct, frozen=True):
    """Headers of a request that decide; empty where missing."""

    host: str
    authorization: str = ""
    origin: str = ""
    fetch_site: str = ""
    """``Sec-Fetch-Site``: browsers say here whose page has asked."""
    content_type: str = ""


def refusal(asked: Asked, token: Secret | None, names: frozenset[str]) -> RequestProblem | None:
    """Why the state must not be changed by this request; ``names`` are hosts that mean us."""
    if token is None:
        message = "no token is configured: set [http] token_file to allow changes over HTTP"
        return RequestProblem(403, "no_token_configured", message)
    if not _is_bearer(asked.authorization, token):
        return RequestProblem(401, "wrong_token", "send 'Authorization: Bearer <token>'")
    if host_name(asked.host) not in names | LOCAL_NAMES:
        message = "the Host header does not name this daemon: see [http] names"
        return RequestProblem(403, "wrong_host", message)
    if asked.origin and _place(asked.origin) != asked.host.lower():
        return RequestProblem(403, "cross_origin", "requests of other sites' pages are refused")
    if asked.fetch_site not in ("", "same-origin", "none"):
        return RequestProblem(403, "cross_origin", "requests of other sites' pages are refused")
    if asked.content_type != "application/json":
        return RequestProblem(415, "wrong_content_type", "send 'Content-Type: application/json'")
    return None


def misnamed(host: str, names: frozenset[str]) -> RequestProblem | None:
    """Why a request to ``host`` gets nothing; ``names`` are hosts that mean us.

    A page that leads a name of its own here sends that name. It cannot send an address, and a
    client that sends no name at all is no browser.
    """
    name = host_name(host).rstrip(".")
    if not host or name in names | LOCAL_NAMES or _is_address(name):
        return None
    message = (
        "the Host header does not name this daemon: ask by its address or host name, or add the "
        "name to [http] names"
    )
    return RequestProblem(403, "wrong_host", message)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_bearer(authorization: str, token: Secret) -> bool:
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode(), token.reveal().encode())
    return same and scheme.lower() == "bearer"


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _place(origin: str) -> str:
    """Host and port of an Origin header; ``null`` and nonsense have none."""
    try:
        return urlsplit(origin).netloc.lower() or origin
    except ValueError:
        return origin

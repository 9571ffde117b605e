"""Access control for HTTP requests that change state. Pure: facts in, a refusal or nothing out.

Any web page can make a browser on the operator's machine send requests, but it cannot send the
token. In addition, requests from another origin or to a foreign host name (DNS rebinding) are
refused.
"""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from msgspec import Struct

from tmd.schema import Secret

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class RequestProblem(Struct, frozen=True):
    """An error as the client receives it."""

    status: int
    code: str
    message: str


class RequestHeaders(Struct, frozen=True):
    """Request headers that decide; empty if missing."""

    host: str
    authorization: str = ""
    origin: str = ""
    fetch_site: str = ""
    """``Sec-Fetch-Site``: the relation of the requesting page to this server."""
    content_type: str = ""


def refusal(
    headers: RequestHeaders, token: Secret | None, names: frozenset[str]
) -> RequestProblem | None:
    """Why this request may not change the state; ``names`` are this daemon's host names."""
    if token is None:
        message = "no token is configured: set [http] token_file to allow changes over HTTP"
        return RequestProblem(403, "no_token_configured", message)
    if not _is_bearer(headers.authorization, token):
        return RequestProblem(401, "wrong_token", "send 'Authorization: Bearer <token>'")
    if host_name(headers.host) not in names | LOCAL_NAMES:
        message = "the Host header does not name this daemon: see [http] names"
        return RequestProblem(403, "wrong_host", message)
    if headers.origin and _place(headers.origin) != headers.host.lower():
        return RequestProblem(403, "cross_origin", "requests of other sites' pages are refused")
    if headers.fetch_site not in ("", "same-origin", "none"):
        return RequestProblem(403, "cross_origin", "requests of other sites' pages are refused")
    if headers.content_type != "application/json":
        return RequestProblem(415, "wrong_content_type", "send 'Content-Type: application/json'")
    return None


def wrong_host(host: str, names: frozenset[str]) -> RequestProblem | None:
    """Why a request to ``host`` is refused; ``names`` are this daemon's host names.

    A page that resolves its own name to this daemon sends that name (DNS rebinding). It cannot send
    an address, and a client that sends no name is not a browser.
    """
    name = host_name(host).rstrip(".")
    if not host or name in names | LOCAL_NAMES or _is_address(name):
        return None
    message = (
        "the Host header does not name this daemon: use its address or host name, or add the "
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
    # aiohttp decodes bytes that are not UTF-8 as surrogates.
    presented = given.strip().encode(errors="surrogateescape")
    same = hmac.compare_digest(presented, token.reveal().encode())
    return same and scheme.lower() == "bearer"


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _place(origin: str) -> str:
    """Host and port of an Origin header; any other value is returned unchanged."""
    try:
        return urlsplit(origin).netloc.lower() or origin
    except ValueError:
        return origin

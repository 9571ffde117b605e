"""The files of the page, from memory. Its policy loads nothing that this daemon does not serve."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from aiohttp import hdrs, web

from tmd.daemon.web.guard import RequestProblem
from tmd.daemon.web.parts import Refused

INDEX = "index.html"
TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time: a daemon that is updated serves other files
}


class Asset(NamedTuple):
    """A file and its entity tag."""

    content: bytes
    tag: str


class Assets:
    """Read at the first request: most daemons never serve the page."""

    def __init__(self) -> None:
        self._files: dict[str, Asset] = {}

    async def index(self, request: web.Request) -> web.Response:
        return self._answer(request, INDEX)

    async def file(self, request: web.Request) -> web.Response:
        return self._answer(request, request.match_info["path"])

    def _answer(self, request: web.Request, path: str) -> web.Response:
        if not self._files:
            found = _files(resources.files(__package__).joinpath("static"), "")
            self._files = {path: _asset(content) for path, content in found}
        asset = self._files.get(path)
        if asset is None:
            raise Refused(RequestProblem(404, "not_found", f"Not Found: {request.path}"))
        headers = {**HEADERS, hdrs.ETAG: asset.tag}
        if request.headers.get(hdrs.IF_NONE_MATCH) == asset.tag:
            return web.Response(status=304, headers=headers)
        kind = TYPES.get(path[path.rfind(".") :], "text/plain")
        return web.Response(body=asset.content, content_type=kind, charset="utf-8", headers=headers)


def _asset(content: bytes) -> Asset:
    return Asset(content, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _files(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    """All files below ``folder`` by their path; nothing else can be asked for."""
    found = []
    for entry in folder.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _files(entry, f"{path}/")
        else:
            found.append((path, entry.read_bytes()))
    return found

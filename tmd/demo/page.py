"""The page of the demo: one of its daemons serves it."""

from __future__ import annotations

import secrets
from pathlib import Path

from msgspec import Struct

from tmd.demo.story import free_port

CONFIG = """
[http]
listen = "127.0.0.1:{port}"
token_file = "{file}"
"""


class DemoPage(Struct, frozen=True):
    """Where the page is, and what it takes to act on it."""

    host: str
    port: int
    token: str
    file: Path

    @property
    def config(self) -> str:
        """What the configuration of ``host`` gets."""
        return CONFIG.format(port=self.port, file=self.file)

    @property
    def sentence(self) -> str:
        return f"page: http://127.0.0.1:{self.port}/   token: {self.token}"


def new_page(host: str, folder: Path) -> DemoPage:
    """A page on a free port, with its token in ``folder``."""
    page = DemoPage(host, free_port(), secrets.token_hex(16), folder / "http-token")
    page.file.touch(mode=0o600)
    page.file.write_text(page.token)
    return page

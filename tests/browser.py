"""A real browser: Debian's chromium, driven by playwright without its bundled browsers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.marks import program

WITHIN_MS = 15_000


class Watched:
    """A page and everything that its browser complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("requestfailed", lambda request: self.complaints.append(f"failed: {request.url}"))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")


def playwright() -> Any:
    """The module; its absence is an error only in CI."""
    try:
        from playwright import async_api
    except ImportError:
        missing = "no playwright: pip install playwright"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return async_api


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """The browser, headless."""
    api, binary = playwright(), program("chromium", "chromium")
    async with api.async_playwright() as driver:
        # Its sandbox needs user namespaces, which root in a container does not have.
        browser = await driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(
    browser: Any, url: str, *, at: float | None = None, **options: Any
) -> AsyncIterator[Watched]:
    """``url`` in a window of its own, once the daemon has sent the state.

    ``at``: the time that its clock shows, which a test can move, by ``page.clock``. ``options``: of
    the window, such as ``color_scheme``.
    """
    options.setdefault("viewport", {"width": 1360, "height": 900})
    context = await browser.new_context(**options)
    try:
        page = await context.new_page()
        page.set_default_timeout(WITHIN_MS)
        watched = Watched(page)
        if at is not None:
            await page.clock.install(time=at)
        await page.goto(url)
        await page.locator("#link.good").wait_for()
        yield watched
    finally:
        await context.close()

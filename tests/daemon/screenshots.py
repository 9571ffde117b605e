"""Pictures of the page for the documentation: ``python -m tests.daemon.screenshots FOLDER``.

Of the made-up cluster that the tests of the page use. The numbers in them are no measurements.
"""

from __future__ import annotations

import asyncio
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

from tests.browser import chromium, opened
from tests.daemon.page_scene import host
from tests.daemon.test_page import made_up
from tests.daemon.test_web import serving

WINDOW = {"width": 1280, "height": 1160}
AT = "training", host(7)
FAILOVER = "#lanes [data-key$='-3'] summary"


async def take(folder: Path) -> None:
    store, past = await made_up()
    async with serving(store, history=past, at=AT) as served, chromium() as browser:
        for scheme in ("light", "dark"):
            address = f"http://127.0.0.1:{served.port}/"
            async with opened(browser, address, color_scheme=scheme, viewport=WINDOW) as watched:
                await watched.page.locator(FAILOVER).click()
                await watched.page.evaluate("scrollTo(0, 0)")
                file = folder / f"page-{scheme}.png"
                taken = await watched.page.screenshot(animations="disabled")
                # 256 colours: a third of the size, and no difference to see.
                Image.open(BytesIO(taken)).convert("RGB").quantize().save(file, optimize=True)
                print(f"{file}: {file.stat().st_size // 1000} kB")
            assert watched.complaints == [], watched.complaints


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1])))

"""What MkDocs calls while it builds the site: fills in generated parts, and checks the result.

A page asks for a generated part by a comment of its own: ``generate: NAME`` between the signs of an
HTML comment, where NAME is a key of :data:`docs.generate.parts.PARTS`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

# MkDocs loads this file by its path.
sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.generate.parts import filled

OUTSIDE = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>"
)
"""What a browser would load from another host when it shows a page."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a site that cannot be read without the network."""
    from mkdocs.exceptions import PluginError

    for file in sorted(Path(config.site_dir).rglob("*.html")):
        found = [tag for tag in OUTSIDE.findall(file.read_text()) if 'rel="canonical"' not in tag]
        if found:
            raise PluginError(f"{file} loads something from the network: {found[0]}")

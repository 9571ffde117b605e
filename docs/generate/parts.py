"""The generated parts of pages, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from docs.generate import codes, configuration, figures, machines, verbs
from tmd.core.values.model import Alert

ROOT = Path(__file__).parents[2]
MARKER = re.compile(r"^<!-- generate: ([\w-]+) -->$", re.MULTILINE)


def alert_schema() -> str:
    """The JSON schema of an alert."""
    return f"```json\n{json.dumps(msgspec.json.schema(Alert), indent=2)}\n```"


def subscriber() -> str:
    """The example that follows alerts, verbatim from ``examples``."""
    return f"```python\n{(ROOT / 'examples' / 'follow_alerts.py').read_text()}```"


def plugins() -> str:
    """The detector and the policy that the tests install and load, from the first import on."""
    file = ROOT / "tests" / "plugins" / "example_distribution" / "tmd_example.py"
    code = file.read_text()
    return f"```python\n{code[code.index('import os') :]}```"


PARTS: dict[str, Callable[[], str]] = {
    "configuration": configuration.reference,
    "commands": verbs.reference,
    "alert-schema": alert_schema,
    "subscriber": subscriber,
    "plugins": plugins,
    "plan-table": machines.plan_table,
    "worker-table": machines.worker_table,
    "generation-table": machines.generation_table,
    "step-table": machines.step_table,
    "response-table": machines.response_table,
    "xids": codes.xids,
    "sxids": codes.sxids,
    **figures.TABLES,
}


def filled(markdown: str) -> str:
    """``markdown`` with all generated parts in their places.

    Raises:
        ValueError: a marker is not alone on its line.
    """
    page = MARKER.sub(lambda found: PARTS[found[1]](), markdown)
    if "<!-- generate:" in page:
        raise ValueError("a marker '<!-- generate: ... -->' is not alone on its line")
    return page

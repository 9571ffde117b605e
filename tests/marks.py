"""Parameters that a quick run leaves out."""

from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """A variant for ``make thorough``."""
    return pytest.param(*values, marks=pytest.mark.thorough)

"""Types of numbers in the configuration, which refuse those out of range."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
"""A number above 0."""
NotNegative = Annotated[float, Meta(ge=0)]
"""A number of at least 0."""
Count = Annotated[int, Meta(ge=1)]
"""A whole number of at least 1."""

"""Types of numbers in the configuration, which refuse those out of range.

No number may be infinite: timers and Redis have no such time. 1e9 seconds are thirty years.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Positive = Annotated[float, Meta(gt=0, le=1e9)]
"""A number above 0."""
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
"""A number of at least 0."""
Count = Annotated[int, Meta(ge=1, le=10**9)]
"""A whole number of at least 1."""

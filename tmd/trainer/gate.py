"""The words in which a gate answers the session."""

from __future__ import annotations

import logging
from enum import Enum, auto
from typing import NoReturn

from tmd.core.duties import Duty, Leave
from tmd.core.model import Activity

SHADOWS = frozenset({Activity.STARTING, Activity.STANDBY, Activity.SHADOWING, Activity.IN_STEP})
"""Activities in which what the script computes counts for nothing."""

log = logging.getLogger("tmd.trainer")


class Interrupted(BaseException):
    """The step is poisoned and will be run again. Swallowed by ``session.step()``.

    A ``BaseException`` so that ``except Exception`` in a training script cannot swallow it.
    """


class Outcome(Enum):
    """What a vote decided for this rank."""

    COMMIT = auto()
    SHADOW = auto()
    """A shadow iteration: the optimizer runs, but nothing counts."""


def dismiss(duty: Duty) -> NoReturn:
    """End this worker as ``duty`` asks, which is as a rule a ``Leave``."""
    detail = duty.detail if isinstance(duty, Leave) else ""
    if detail:
        log.warning("dismissed: %s", detail)
    raise SystemExit(duty.code if isinstance(duty, Leave) else 0)

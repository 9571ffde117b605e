"""A kernel log, and the scripted driver."""

from __future__ import annotations

import pytest

from tests.plugins.nvml.driver import script, shim

from .log import Log

__all__ = ["log", "script", "shim"]


@pytest.fixture
def log():
    log = Log()
    yield log
    log.close()

"""The random generators of a process, which a step must find as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states() -> list[Any]:
    """The state of those of Python, NumPy and torch."""
    numpy: Any = np.random.get_state()
    return [random.getstate(), numpy[1].tolist(), torch.get_rng_state().tolist()]

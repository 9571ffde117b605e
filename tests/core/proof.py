"""How thoroughly the state machines are run: in a minute, or (``make proof``) for a long time."""

import os

from hypothesis import HealthCheck, settings

SCALE = int(os.environ.get("TMD_PROOF_SCALE", "1"))
EXAMPLES = {"simulation": 150, "plane": 60}
"""Number of examples of each machine, at scale 1."""


def thorough(machine: str, steps: int) -> settings:
    """Settings for a state machine that runs ``steps`` rules in each example."""
    return settings(
        max_examples=EXAMPLES[machine] * SCALE,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )

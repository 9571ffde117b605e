"""How far a shadow is behind, and what time does not count."""

from __future__ import annotations

from tmd.trainer.shadow.lag import EvaluationTime


def test_the_time_of_evaluations_is_added_up() -> None:
    """Of one that still runs, too: a joiner is not late because its rank evaluates."""
    time = EvaluationTime()
    seen = []
    for at, evaluates in ((1.0, False), (2.0, True), (12.0, False), (13.0, True)):
        time.boundary(at, evaluates=evaluates)
        seen.append(time.seconds(at + 0.5))

    assert seen == [0.0, 0.5, 10.0, 10.5]

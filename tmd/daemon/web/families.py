"""How the metrics are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

JOB = "training_job"
"""The label of a job of tmd: Prometheus itself has a label ``job``."""
CLUSTER = "tmd_cluster"
"""The label of a cluster of tmd: operators give ``cluster`` to targets or to a Prometheus."""


def gauge(name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
    """A gauge with one value for each tuple of label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for place, value in values.items():
        family.add_metric(place, float(value))
    return family

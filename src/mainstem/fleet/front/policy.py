"""Ray Serve's autoscaling policy of the engines. Serve copies this module by value, and what it names by reference."""

from __future__ import annotations

from typing import Any

from mainstem.fleet import scaling
from mainstem.settings.fleet import Autoscaling


class ReplicaPolicy:
    """Calls `scaling.wanted` with the counts that Serve has gathered.

    Args:
        settings: the fields of `Autoscaling`.
    """

    def __init__(self, **settings: Any) -> None:
        self._scaling = Autoscaling(**settings)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Returns the number for Serve's context of a deployment, and no state."""
        metrics = context.aggregated_metrics or {}
        by_replica: dict[Any, dict[str, float]] = {}
        for name, values in metrics.items():
            for replica, value in values.items():
                by_replica.setdefault(replica, {})[name] = value
        seen = [scaling.Seen.of(values) for values in by_replica.values()]
        return scaling.wanted(context.target_num_replicas, context.total_num_requests, self._scaling, seen), {}

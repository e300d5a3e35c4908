"""Carries our metrics from vLLM's processes to its log line and its /metrics endpoint.

Each step the engine takes what the workers and the scheduler have counted since the last one, joins
it, and gives it to its loggers: KVConnectorLogging writes a line at the engine's own interval, and
CXLMetrics adds it to the registry behind /metrics and LLM.get_metrics(). `counting` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cxlkv.adapters.common.metrics import Metrics, Moves
from cxlkv.adapters.vllm import counting
from cxlkv.adapters.vllm.counting import (
    CAPACITIES,
    COUNTS,
    KINDS,
    PREFIX,
    Counting,
    Figures,
    Looking,
)
from cxlkv.adapters.vllm.scheduler import Scheduling

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CXLStats(KVConnectorStats):
    """Figures, in the engine's wrapping; data is a dict that survives its serialisation."""

    def __init__(self, data: Figures | None = None):
        super().__init__(data=data or counting.nothing())

    def reset(self) -> None:
        self.data = counting.nothing()

    def aggregate(self, other: CXLStats) -> CXLStats:
        return CXLStats(counting.joined(self.data, other.data))

    def reduce(self) -> dict[str, str]:
        return {"cxlkv": counting.line(self.data)}

    def is_empty(self) -> bool:
        return counting.is_empty(self.data)


class Reporting:
    """The connector's part that the engine asks for figures; one of the two is there."""

    counting: Counting | None = None
    looking: dict[int, Looking]  # a worker's, by the number of its pool
    moves: list[Moves]  # of the scheduler's tiers, by rank
    scheduling: Scheduling | None

    def get_kv_connector_stats(self) -> CXLStats | None:
        found: Figures | None = None
        if self.counting is not None and self.scheduling is not None:
            scheduling = self.scheduling
            found = self.counting.take(scheduling.failures, scheduling.come_tokens)
            for moves in self.moves:
                found = counting.with_moves(found, moves)
        for new in filter(None, [one.take() for one in self.looking.values()]):
            found = new if found is None else counting.joined(found, new)
        return None if found is None or counting.is_empty(found) else CXLStats(found)

    @classmethod
    def build_kv_connector_stats(cls, data: Figures | None = None) -> CXLStats:
        return CXLStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CXLMetrics:
        return CXLMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class CXLMetrics(KVConnectorPromMetrics):
    """Metrics in the endpoint's process. Every counter is there from the start, as 0."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        types = metric_types[Counter], metric_types[Gauge]
        self._metrics = Metrics(*types, PREFIX, labelnames, COUNTS, CAPACITIES)
        for values in per_engine_labelvalues.values():
            self._metrics.begin(values, KINDS)

    def observe(self, transfer_stats_data: Figures, engine_idx: int = 0) -> None:
        values, found = self.per_engine_labelvalues[engine_idx], transfer_stats_data
        self._metrics.add(values, found["counts"], found["failures"], found["links"])
        for path, pool in found["pools"].items():
            self._metrics.fill(values, path, pool)

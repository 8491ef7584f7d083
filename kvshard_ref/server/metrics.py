"""/metrics and /v1/loads: what all ranks counted, as Prometheus text that is made anew at each scrape, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvshard_ref.errors import MisuseError
from kvshard_ref.server.api import Info, Stats

PREFIX = "sglang:"
NAME = re.compile(r"(?P<name>[a-zA-Z_]\w*)(\{(?P<labels>(\w+=\"[^\"]*\",?)*)\})?")
LABEL = re.compile(r"(\w+)=\"([^\"]*)\"")


class RankStats(Collector):
    """What the ranks counted, one sample per rank with its label tp_rank.

    A name may carry labels of its own: `cached_tokens_total{cache_source="device"}`.
    """

    def __init__(self, stats: Sequence[Stats], labels: Mapping[str, str]) -> None:
        """`labels` go onto every sample."""
        self._stats, self._labels = stats, labels

    def collect(self) -> Iterator[Metric]:
        """Families by name; one sample for each rank that has it."""
        yield from self._families(CounterMetricFamily, ((each.rank, each.counters) for each in self._stats))
        yield from self._families(GaugeMetricFamily, ((each.rank, each.gauges) for each in self._stats))

    def _families(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        values: Iterable[tuple[int, Mapping[str, float]]],
    ) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for rank, of_rank in values:
            for full, value in of_rank.items():
                name, own = parsed(full)
                family = families.setdefault(name, kind(PREFIX + name, name.replace("_", " ")))
                # a counter's sample must end in _total, its family must not
                sample = PREFIX + name.removesuffix("_total") + "_total" if kind is CounterMetricFamily else family.name
                family.add_sample(sample, {**self._labels, "tp_rank": str(rank), **own}, value)
        yield from families.values()


def parsed(full: str) -> tuple[str, dict[str, str]]:
    """Name and labels of `name{label="value",...}`."""
    match = NAME.fullmatch(full)
    if match is None:
        raise MisuseError(
            f'a statistic is named {full!r}, expected a name such as kv_used_tokens or name{{label="value"}}'
        )
    return match["name"], dict(LABEL.findall(match["labels"] or ""))


def exposition(stats: Sequence[Stats], labels: Mapping[str, str]) -> bytes:
    """All ranks in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(RankStats(stats, labels))
    return generate_latest(registry)


def loads_of(stats: Sequence[Stats], info: Info) -> dict[str, Any]:
    """/v1/loads: the worker as one, and each rank's own numbers."""
    ranks = sorted(stats, key=lambda each: each.rank)
    group = dict(ranks[0].gauges) if ranks else {}  # requests and queues are the same on all ranks
    load = {
        "dp_rank": 0,
        **group,
        "num_waiting_reqs": group.get("num_queue_reqs", 0),
        "max_total_num_tokens": info.max_total_num_tokens,
        "ranks": [{"tp_rank": each.rank, **each.counters, **each.gauges} for each in ranks],
    }
    return {"timestamp": datetime.now(UTC).isoformat(), "version": info.version, "loads": [load]}

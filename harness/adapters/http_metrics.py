"""Prometheus text as counters and levels of each rank, by names without a prefix and without labels."""

from __future__ import annotations

import re
from collections import defaultdict

SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(\{(?P<labels>.*)\})?\s+(?P<value>\S+)(\s+\S+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
OF_PROCESS = re.compile(r"(process|python|http)_")
"""Begins what a client library counts of its own process and face, which moves while the engine is at rest."""
RANK = "tp_rank"
SOURCE = "cache_source"
"""Of a counter that this label splits each part has a name: cached_tokens_total becomes cached_tokens_device_total."""


def ranks_of(text: str) -> dict[int, dict[str, float]]:
    """Rank -> name -> value; what has no rank is of rank 0. Raises ValueError for a line that is no sample."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"{line[:80]!r} is no sample of Prometheus' text format")
        name = match["name"].rpartition(":")[2]
        if name.endswith(("_bucket", "_created")) or OF_PROCESS.match(match["name"]):
            continue
        labels = dict(LABEL.findall(match["labels"] or ""))
        counters = found[int(labels.get(RANK, "0") or 0)]
        value = float(match["value"])
        counters[name] += value
        if SOURCE in labels and name.endswith("_total"):
            counters[f"{name.removesuffix('_total')}_{labels[SOURCE]}_total"] += value
    return {rank: dict(counters) for rank, counters in sorted(found.items())}

"""One server of the rig as a set, and a task for it, for tests of what plants faults under gates."""

from __future__ import annotations

import json
from pathlib import Path

from harness.gate_tasks import Item, Scored, Task, Wanted

ROOT = Path(__file__).parent.parent
SERVERS = """
[defaults]
health = "/v1/models"
ready_seconds = 30
stop_seconds = 5

[[worker]]
name = "sharded"
command = ["{python}", "-m", "tests.gate_trials_rig", "{port}"]

[entry]
worker = "sharded"
"""


def facts(wanted: Wanted) -> Task:
    """A task of facts that needs no lm-eval."""
    assert wanted.data is not None
    rows = [json.loads(text) for text in wanted.data.read_text().splitlines()]
    return Task(
        name="facts",
        definition="d1",
        filter="none",
        filters=("none",),
        shots=0,
        data="made",
        items=tuple(Item(f"{row['prompt']}", row["prompt"]) for row in rows),
        generation={"max_tokens": 8, "temperature": 0.0, "stop": [";"]},
        score=lambda at, text: Scored(text == rows[at]["answer"], text),
    )

"""Write the page about the tiny model, from its weights' record: `python -m ci.model_page > docs/model.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ci.model_eval import PAGE_SIZE
from kvshard_ref.model import ModelGeometry, TinyModel

RECORD = Path(__file__).parent.parent / "fixtures" / "model" / "model.json"
TEMPLATE = Path(__file__).with_suffix(".md")
Json = Mapping[str, Any]


def trained(made: Json) -> Iterator[str]:
    """How it came to be, a line for each training."""
    for run in (*made["before"], made):
        plan, last = run["plan"], run["records"][-1]
        files = "--refine first/model.safetensors --out second" if plan.get("refines") else "--out first"
        command = f"--device {plan['device']} --seconds {plan['seconds']:g} --seed {plan['seed']} {files}"
        stages = ", ".join(f"{s['length']} x {s['documents']}{' sparse' * s['sparse']}" for s in plan["stages"])
        loss = f"{run['records'][0]['target']} -> {last['target']}"
        yield f"- `python -m ci.train_model {command}`: {last['step']:,} steps of {stages} (tokens x documents);"
        yield f"  loss of the target {loss}; torch {run['versions']['torch']}."


def lost(told: Json) -> Iterator[str]:
    """The rows of the table of losses."""
    for name, row in told["losses"].items():
        values = f"{row['recall']:.3f} | {row['accept_length_cut']:.2f} | {row['scores_moved']:.2f}"
        yield f"| {name} | {values} | {told['untrained_losses'][name]['scores_moved']:.2f} |"


def text(record: Path = RECORD) -> str:
    """The whole page."""
    made = json.loads(record.read_text(encoding="utf-8"))
    geometry, told = ModelGeometry(**made["geometry"]), made["evaluation"]
    return TEMPLATE.read_text(encoding="utf-8").format(
        parameters=sum(each.numel() for each in TinyModel(geometry).parameters()),
        geometry=geometry,
        trained="\n".join(trained(made)),
        told=told,
        size=told["pages"] * PAGE_SIZE,
        page_size=PAGE_SIZE,
        recall=told["right"] / told["questions"],
        sums=told["sums_right"] / told["sums"],
        count=told["losses"]["nothing"]["questions"],
        untrained=told["untrained_losses"]["nothing"]["questions"],
        lost="\n".join(lost(told)),
    )


if __name__ == "__main__":
    sys.stdout.write(text())

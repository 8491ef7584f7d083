"""Train the tiny model: `python -m ci.train_model --out FOLDER --device cuda --seconds 310`.

Writes weights (model.safetensors), how they were made (model.json) and the tokenizer to FOLDER. `--tiny` trains a much
smaller one for a few steps, to see that the loss falls. Exit codes: 0 the loss fell, 1 it did not.

The stages share the time as in the run that the recipe comes from. `--restrict` lets one layer alone look far for an
answer, so that more layers learn to fetch far rows; docs/model.md says what came of it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ci.model_tasks import Tasks
from kvshard_ref.model import ModelGeometry, TinyModel, load, save

DRAFT_WEIGHT = 0.2  # of each step's loss
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|unk|>")  # ids behind the 256 bytes


@dataclass(frozen=True, slots=True)
class Stage:
    """Documents of one length for a share of the time, or for a number of steps."""

    length: int
    documents: int
    sparse: bool
    share: float
    steps: int | None = None


STAGES = (
    Stage(128, 128, sparse=False, share=0.16),
    Stage(512, 64, sparse=False, share=0.355),
    Stage(512, 64, sparse=True, share=0.225),
    Stage(2112, 12, sparse=True, share=0.26),
)
REFINE_STAGES = (
    Stage(512, 64, sparse=True, share=0.1),
    Stage(2112, 12, sparse=True, share=0.9),
)
TINY_STAGES = (
    Stage(96, 8, sparse=False, share=0.5, steps=30),
    Stage(96, 8, sparse=True, share=0.5, steps=10),
)
TINY = ModelGeometry(
    width=48,
    layers=2,
    gate_width=96,
    heads=2,
    query_rank=24,
    nope_width=16,
    rope_width=8,
    value_width=16,
    latent_width=24,
    index_heads=2,
    index_width=16,
    top_k=16,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a training does; times in seconds, `warmup` in steps."""

    stages: tuple[Stage, ...] = STAGES
    seconds: float = 310.0
    seed: int = 1
    device: str = "cpu"
    restrict: float = 0.0
    rate: float = 2e-3
    warmup: int = 300
    workers: int = 0
    refines: str = ""
    """SHA-256 of the weights that it begins with; none: random ones."""

    @property
    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Bfloat16 on a GPU, float32 elsewhere."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.startswith("cuda") else contextlib.nullcontext()


class Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Batch `index` of a stage: tokens, weights and far layers, each [documents, length], by seed and index alone."""

    def __init__(self, tasks: Tasks, stage: Stage, seed: str, restrict: float) -> None:
        self.tasks, self.stage, self.seed, self.restrict = tasks, stage, seed, restrict

    def __len__(self) -> int:
        return 10**6 if self.stage.steps is None else self.stage.steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        stage = self.stage
        made = self.tasks.batch(f"{self.seed} {index}", stage.documents, stage.length, self.restrict)
        return torch.from_numpy(made.tokens), torch.from_numpy(made.weights), torch.from_numpy(made.far_layers)


def weighted(logits: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, n, vocab] for tokens [batch, n], by weights [batch, n]."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1.0)


def loss_of(model: TinyModel, batch: tuple[Tensor, Tensor, Tensor], *, sparse: bool) -> dict[str, Tensor]:
    """The parts of the loss of one batch: of the target, of the draft (all steps) and of the indexers."""
    tokens, weights, far = batch
    embedded = model.embed(tokens)
    taught: list[Tensor] = []
    hidden = model.whole(embedded, far, sparse=sparse, losses=taught)
    target = weighted(model.logits(hidden[:, :-1]), tokens[:, 1:], weights[:, 1:])
    outputs = model.draft.unroll(embedded[:, 1:], hidden[:, :-1], 0, None, sparse=sparse, losses=taught)
    draft = torch.zeros_like(target)
    for step, output in enumerate(outputs, start=1):
        known = output[:, : tokens.shape[1] - step - 1]
        draft = draft + weighted(model.draft_logits(known), tokens[:, step + 1 :], weights[:, step + 1 :])
    return {"target": target, "draft": DRAFT_WEIGHT * draft, "index": torch.stack(taught).sum()}


def rate_at(done: float) -> float:
    """Share of the learning rate when a share `done` of the training is over: constant to 60 %, then down to 5 %."""
    return 1.0 if done < 0.6 else 1.0 - 0.95 * (min(done, 1.0) - 0.6) / 0.4


def progress(plan: Plan, stage: Stage, started: float) -> Iterator[float]:
    """Before each step of a stage: the share of the stage that is over."""
    step = 0
    while True:
        over = (
            (time.monotonic() - started) / (plan.seconds * stage.share) if stage.steps is None else step / stage.steps
        )
        if over >= 1.0:
            return
        yield over
        step += 1


def train(model: TinyModel, plan: Plan, *, kinds: int) -> list[dict[str, float]]:
    """Train in place; returns a record of losses every 50 steps and at each stage's first and last step."""
    model.to(plan.device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.95))
    tasks = Tasks(kinds)
    records: list[dict[str, float]] = []
    begun, step, before = time.monotonic(), 0, 0.0
    for number, stage in enumerate(plan.stages):
        batches = Batches(tasks, stage, f"{plan.seed} {number}", plan.restrict)
        loader = DataLoader(batches, batch_size=None, num_workers=plan.workers, generator=torch.Generator())
        for at, (over, batch) in enumerate(zip(progress(plan, stage, time.monotonic()), loader, strict=False)):
            share = rate_at(before + stage.share * over) * min(1.0, (step + 1) / plan.warmup)
            for group in optimiser.param_groups:
                group["lr"] = plan.rate * share
            tokens, weights, far = (each.to(plan.device, non_blocking=True) for each in batch)
            with plan.autocast:
                parts = loss_of(model, (tokens, weights, far), sparse=stage.sparse)
            optimiser.zero_grad(set_to_none=True)
            torch.stack(list(parts.values())).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            step += 1
            if at % 50 == 0 or (stage.steps is not None and at == stage.steps - 1):
                losses = {name: round(part.item(), 4) for name, part in parts.items()}
                records.append({"step": step, "stage": number, "seconds": round(time.monotonic() - begun, 1), **losses})
                print(json.dumps(records[-1]), flush=True)
        before += stage.share
    return records


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token per byte, its id the byte, then the specials."""
    # bytes that have no printable character of their own get the next one from 256 on, as byte-level tokenizers do
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 256 + at, "content": name, **flags} for at, name in enumerate(SPECIALS)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {characters[byte]: byte for byte in range(256)}, "merges": []},
    }
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        **dict(zip(names, SPECIALS, strict=True)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    usual = Plan()
    parse = argparse.ArgumentParser("train_model", description="Train the tiny model of the reference.")
    parse.add_argument("--out", type=Path, help="folder for weights, record and tokenizer")
    parse.add_argument(
        "--seconds", type=float, default=usual.seconds, help="of training, shared by the stages (%(default)s)"
    )
    parse.add_argument("--seed", type=int, default=usual.seed, help="of weights and documents (%(default)s)")
    parse.add_argument("--device", default=usual.device, help="cpu or cuda (%(default)s)")
    parse.add_argument("--workers", type=int, default=8, help="processes that make documents (%(default)s)")
    parse.add_argument(
        "--restrict",
        type=float,
        default=usual.restrict,
        help="share of documents in which one layer alone looks far for an answer; 0: one kind of facts (%(default)s)",
    )
    parse.add_argument(
        "--refine",
        type=Path,
        metavar="FILE",
        help="begin with these weights, at half the rate, on long documents; their model.json lies beside them",
    )
    parse.add_argument("--tiny", action="store_true", help="a few steps of a much smaller model on the CPU")
    parse.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="write the tokenizer there and do nothing else")
    return parse


def main(arguments: list[str]) -> int:
    """Train as the command line says; return the exit code."""
    parse = parser()
    chosen = parse.parse_args(arguments)
    if chosen.tokenizer:
        write_tokenizer(chosen.tokenizer)
        return 0
    geometry = TINY if chosen.tiny else ModelGeometry()
    plan = Plan(
        seconds=chosen.seconds, seed=chosen.seed, device=chosen.device, restrict=chosen.restrict, workers=chosen.workers
    )
    if chosen.tiny:
        plan = replace(plan, stages=TINY_STAGES, device="cpu", workers=0, warmup=5, rate=5e-3)
    model, before = TinyModel(geometry, seed=plan.seed), list[Any]()
    if chosen.refine:
        for needed in (chosen.refine, chosen.refine.with_suffix(".json")):
            if not needed.is_file():
                parse.error(
                    f"--refine {chosen.refine}: no file {needed}; expected weights and, beside them, their record"
                )
        refines = hashlib.sha256(chosen.refine.read_bytes()).hexdigest()
        plan = replace(plan, stages=TINY_STAGES if chosen.tiny else REFINE_STAGES, rate=plan.rate / 2, refines=refines)
        model = load(chosen.refine)
        earlier = json.loads(chosen.refine.with_suffix(".json").read_text(encoding="utf-8"))
        before = [*earlier.pop("before", []), earlier]
    print(f"{sum(each.numel() for each in model.parameters())} parameters")
    kinds = geometry.layers if plan.restrict else 1
    records = train(model, plan, kinds=kinds)
    first, last = records[0]["target"], records[-1]["target"]
    steps, verb = records[-1]["step"], "falls" if last < first else "rises"
    print(f"loss of the target {first:.3f} -> {last:.3f} in {steps} steps: {verb}")
    if chosen.out:
        write_tokenizer(chosen.out)
        save(model, chosen.out / "model.safetensors")
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        made = {
            "plan": asdict(plan),
            "kinds": kinds,
            "geometry": asdict(geometry),
            "versions": versions,
            "records": records,
            "before": before,
        }
        (chosen.out / "model.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 0 if last < first else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

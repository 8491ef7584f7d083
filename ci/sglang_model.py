"""A tiny model for sglang: `python -m ci.sglang_model FOLDER [--shape mla] [--seconds N]`; needs transformers.

Writes FOLDER as a Hugging Face model of 6 M parameters in bfloat16; a token is a byte. Of the shape `gqa` it is a
Qwen3-MoE, whose class can split a prompt over ranks; of the shape `mla` a DeepSeek-V2, with latent rows of the widths
that kernels are made for. With seconds it is trained that long on the facts and sums of the reference's model, and
asked afterwards; how it did is in FOLDER/made.json. Without, weights are random: answers differ wherever a row does.
Exit codes: 0 written, 1 it was trained and found no fact.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (  # type: ignore[import-not-found,unused-ignore]  # of an environment of its own
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ci.model_tasks import Tasks
from ci.train_model import SPECIALS, Batches, Stage, rate_at, weighted, write_tokenizer

LAYERS, HIDDEN, EXPERTS, EXPERTS_USED, FEED_FORWARD = 4, 256, 8, 2, 128
CONTEXT, VOCAB = 8192, 256 + len(SPECIALS)
SPREAD = 0.08  # standard deviation of random weights that stay: less, and every answer is the same
STAGES = (
    Stage(128, 128, sparse=False, share=0.3),
    Stage(512, 64, sparse=False, share=0.4),
    Stage(1152, 24, sparse=False, share=0.3),
)
RATE, WARMUP_STEPS, BALANCE = 2e-3, 300, 0.01
QUESTION_PAGES, CONTEXTS = 12, 8  # of 64 tokens


def built(shape: str, seed: int, *, spread: float) -> Any:
    """All weights, seeded."""
    torch.manual_seed(seed)
    usual = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "moe_intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_experts_per_tok": EXPERTS_USED,
        "max_position_embeddings": CONTEXT,
        "initializer_range": spread,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": False,
    }
    return _mla(usual) if shape == "mla" else _gqa(usual)


def _gqa(usual: dict[str, Any]) -> Any:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**usual, **heads, num_experts=EXPERTS, norm_topk_prob=True))


def _mla(usual: dict[str, Any]) -> Any:
    """No layer has experts, so no tie between two of them. What is said of experts and groups is read by sglang."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 512}
    widths = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": LAYERS, "n_group": 1}
    said = {"topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "moe_layer_freq": 1}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**usual, **heads, **widths, **experts, **said))


def train(model: Any, seconds: float, seed: int, device: str, workers: int) -> list[dict[str, float]]:
    """Train in place; returns a record of the loss every 100 steps."""
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    cast = torch.autocast("cuda", torch.bfloat16) if device.startswith("cuda") else contextlib.nullcontext()
    tasks, records, begun, step, before = Tasks(1), list[dict[str, float]](), time.monotonic(), 0, 0.0
    for number, stage in enumerate(STAGES):
        batches = Batches(tasks, stage, f"{seed} {number}", 0.0)
        loader = DataLoader(batches, batch_size=None, num_workers=workers, generator=torch.Generator())
        for tokens, weights, _ in loader:
            done = (time.monotonic() - begun) / seconds
            if done >= before + stage.share:
                break
            for group in optimiser.param_groups:
                group["lr"] = RATE * rate_at(done) * min(1.0, (step + 1) / WARMUP_STEPS)
            with cast:
                loss, balance = loss_of(model, tokens.to(device), weights.to(device))
            optimiser.zero_grad(set_to_none=True)
            (loss + BALANCE * balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if step % 100 == 0:
                records.append({"step": step, "seconds": round(time.monotonic() - begun, 1), "loss": loss.item()})
                print(json.dumps(records[-1]), flush=True)
            step += 1
        before += stage.share
    return records


def loss_of(model: Any, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | float]:
    """Of tokens and weights, each [documents, n]: what it predicts wrongly, and how unlike the experts are used.

    The second is 0 for a class that does not tell it.
    """
    told = {"output_router_logits": True} if hasattr(model, "router_aux_loss_coef") else {}
    out = model(tokens, use_cache=False, **told)
    return weighted(out.logits[:, :-1], tokens[:, 1:], weights[:, 1:]), getattr(out, "aux_loss", None) or 0.0


@torch.no_grad()
def recall(model: Any, seed: int, device: str) -> tuple[int, int]:
    """Answers that are right in each token, and questions: one about each page of unseen contexts."""
    model.to(device).eval()
    rng, right, asked = random.Random(f"recall {seed}"), 0, 0
    for _ in range(CONTEXTS):
        text, questions = Tasks(1).context(rng, QUESTION_PAGES)
        for question in questions:
            begin = text + question.prompt
            tokens = torch.tensor([list(begin + question.answer)], device=device)
            guess = model(tokens, use_cache=False).logits[0, len(begin) - 1 : -1].argmax(-1)
            right += guess.tolist() == list(question.answer)
            asked += 1
    return right, asked


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--shape", choices=("gqa", "mla"), default="gqa", help="of its attention (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, help="of training; 0: random weights (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--seed", type=int, default=20, help="of weights and documents (%(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="processes that make documents (%(default)s)")
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder
    model = built(chosen.shape, chosen.seed, spread=0.02 if chosen.seconds else SPREAD)
    made: dict[str, Any] = {
        "shape": chosen.shape,
        "seed": chosen.seed,
        "seconds": chosen.seconds,
        "torch": torch.__version__,
    }
    made["parameters"] = sum(each.numel() for each in model.parameters())
    if chosen.seconds:
        made["records"] = train(model, chosen.seconds, chosen.seed, chosen.device, chosen.workers)
    model.to(torch.bfloat16)
    if chosen.seconds:
        made["right"], made["asked"] = recall(model, chosen.seed, chosen.device)
    folder.mkdir(parents=True, exist_ok=True)
    model.cpu().save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "made.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in made.items() if name != "records"}))
    return int(bool(chosen.seconds) and not made["right"])


if __name__ == "__main__":
    sys.exit(main())

"""Ask a trained model: `python -m ci.model_eval FOLDER/model.safetensors`, and see what each loss of rows does to it.

Recall: one question per page and kind of fact, each in a copy of one prefilled cache. Text is fed as expected, and an
answer is right when the model would have said each of its bytes; that is what greedy decoding says. Accept length: the
target's token and the drafts accepted with it, in an answer ("cut": not beyond its end, so below the most). Scores: the
log probabilities of question and answer; they have moved when the end-to-end suite would not take them for the same.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ci.model_tasks import Question, Tasks, held_out_sums
from harness.adapters.http_info import TOLERANCES
from kvshard_ref.model import Reading, Rows, TinyModel, load
from suites.e2e.alike import FAR_PARTS

PAGE_SIZE = 64
CHUNK = 256  # tokens of one prefill step
SUMS_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Cache:
    """Rows of known tokens [batch, n]: of every target layer, n; of the draft, n - 1, since it needs the next token."""

    tokens: Tensor
    rows: tuple[Rows, ...]
    draft: Rows | None
    hidden: Tensor
    """The target's last hidden state [batch, 1, width] at the last token."""

    def copies(self, count: int) -> Cache:
        """`count` requests with this one's rows, which they may write into."""
        draft = None if self.draft is None else repeated(self.draft, count)
        rows = tuple(repeated(each, count) for each in self.rows)
        return Cache(self.tokens.expand(count, -1), rows, draft, self.hidden.expand(count, -1, -1))


class Said(NamedTuple):
    """What came of one question."""

    right: bool
    accepted: float
    """Accept length within the answer."""
    scores: list[float]
    """Log probability of each byte of question and answer but the first."""


def repeated(rows: Rows, count: int) -> Rows:
    """Rows of one request as rows of `count`, in memory of their own."""
    return Rows(rows.latent.repeat(count, 1, 1), rows.index_key.repeat(count, 1, 1))


def cut(rows: Rows, count: int) -> Rows:
    """The first `count` rows."""
    return Rows(rows.latent[:, :count], rows.index_key[:, :count])


def step(model: TinyModel, tokens: Tensor, before: Tensor, prefix: Sequence[Rows]) -> tuple[Tensor, tuple[Rows, ...]]:
    """The target's hidden states of a chunk [batch, n] behind `before` [batch, m]; each layer's rows up to its end."""
    positions = torch.arange(before.shape[1], before.shape[1] + tokens.shape[1], device=tokens.device)
    hidden = model.embed(tokens, before)
    together = []
    for at, layer in enumerate(model.layers):
        fresh = layer.fresh(hidden, positions)
        together.append(prefix[at].then(fresh) if prefix else fresh)
        hidden = layer.read(hidden, positions, Reading(together[-1]))
    return hidden, tuple(together)


def draft_rows(model: TinyModel, tokens: Tensor, hidden: Tensor, start: int, prefix: Rows | None) -> Rows | None:
    """The draft's rows up to the position before the last token; hidden [batch, n, width] from position `start` on."""
    if not hidden.shape[1]:
        return prefix
    embedded = model.embed(tokens[:, start + 1 : start + 1 + hidden.shape[1]], tokens[:, : start + 1])
    positions = torch.arange(start, start + hidden.shape[1], device=tokens.device)
    fresh = model.draft.layer.fresh(model.draft.enter(embedded, hidden), positions)
    return fresh if prefix is None else prefix.then(fresh)


def extend(model: TinyModel, tokens: Tensor, cache: Cache | None = None) -> tuple[Cache, Tensor]:
    """The cache after known tokens [batch, n] too, and their hidden states [batch, n, width]."""
    before = tokens[:, :0] if cache is None else cache.tokens
    known = torch.cat([before, tokens], dim=1)
    hidden, rows = step(model, tokens, before, () if cache is None else cache.rows)
    inputs = hidden[:, :-1] if cache is None else torch.cat([cache.hidden, hidden[:, :-1]], dim=1)
    start = max(0, before.shape[1] - 1)
    draft = draft_rows(model, known, inputs, start, None if cache is None else cache.draft)
    return Cache(known, rows, draft, hidden[:, -1:]), hidden


def prefill(model: TinyModel, text: bytes, device: str = "cpu") -> Cache:
    """The cache of one request, in chunks."""
    if not text:
        raise ValueError("the text is empty, expected at least one byte")
    first, *rest = torch.tensor([list(text)], device=device).split(CHUNK, dim=1)
    cache, _ = extend(model, first)
    for chunk in rest:
        cache, _ = extend(model, chunk, cache)
    return cache


def propose(model: TinyModel, cache: Cache, token: int) -> list[int]:
    """Draft greedily what comes behind `token`, the one behind the cache's; topk 1. Batch of one."""
    known = torch.cat([cache.tokens, cache.tokens.new_tensor([[token]])], dim=1)
    rows, hidden, drafts = cache.draft, cache.hidden, list[int]()
    for _ in range(model.draft.steps):
        at = known.shape[1] - 2
        positions = torch.tensor([at], device=known.device)
        inputs = model.draft.enter(model.embed(known[:, -1:], known[:, :-1]), hidden)
        fresh = model.draft.layer.fresh(inputs, positions)
        rows = fresh if rows is None else rows.then(fresh)
        hidden = model.draft.layer.read(inputs, positions, Reading(rows))
        drafts.append(int(model.draft_logits(hidden).argmax()))
        known = torch.cat([known, known.new_tensor([[drafts[-1]]])], dim=1)
    return drafts


def generate(model: TinyModel, cache: Cache, count: int) -> tuple[list[int], list[int]]:
    """At least `count` tokens behind the cache's, and the tokens that each round gave: 1 + accepted drafts."""
    token = int(model.logits(cache.hidden).argmax())
    said, rounds = [token], list[int]()
    while len(said) < count:
        chunk = [token, *propose(model, cache, token)]
        hidden, rows = step(model, cache.tokens.new_tensor([chunk]), cache.tokens, cache.rows)
        verified = model.logits(hidden)[0].argmax(dim=-1).tolist()
        accepted = agreeing(chunk[1:], verified)
        kept = cache.tokens.shape[1] + 1 + accepted
        known = torch.cat([cache.tokens, cache.tokens.new_tensor([chunk[: 1 + accepted]])], dim=1)
        inputs = torch.cat([cache.hidden, hidden[:, :accepted]], dim=1)
        draft = draft_rows(model, known, inputs, cache.tokens.shape[1] - 1, cache.draft)
        cache = Cache(known, tuple(cut(each, kept) for each in rows), draft, hidden[:, accepted : accepted + 1])
        said += verified[: accepted + 1]
        token = said[-1]
        rounds.append(1 + accepted)
    return said, rounds


def agreeing(drafts: Sequence[int], verified: Sequence[int]) -> int:
    """How many drafts are accepted: those before the first that the target did not say."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == verified[accepted]:
        accepted += 1
    return accepted


def ask(model: TinyModel, cache: Cache, questions: Sequence[Question]) -> list[Said]:
    """One question per request of `cache`, whose batch is as long; they are answered side by side."""
    texts = [list(each.prompt + each.answer) for each in questions]
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [ord(" ")] * (longest - len(text)) for text in texts], device=cache.hidden.device)
    start = cache.tokens.shape[1]
    hidden, _ = step(model, tokens, cache.tokens, cache.rows)
    embedded = model.embed(tokens, cache.tokens)
    inputs = torch.cat([cache.hidden, hidden[:, :-1]], dim=1)
    outputs = model.draft.unroll(embedded, inputs, start - 1, cache.draft)
    logits = model.logits(hidden)
    says = logits.argmax(dim=-1).tolist()  # place i says the token of place i + 1
    scores = logits.log_softmax(dim=-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0].tolist()
    drafts = [model.draft_logits(each).argmax(dim=-1).tolist() for each in outputs]  # step s says the one of i + s
    answers = []
    for at, question in enumerate(questions):
        first, end = len(question.prompt), len(texts[at])
        right = says[at][first - 1 : end - 1] == texts[at][first:end]
        accepted = accept_length([each[at] for each in drafts], says[at], first, end)
        answers.append(Said(right, accepted, scores[at][: end - 1]))
    return answers


def moved(scores: Sequence[float], before: Sequence[float]) -> bool:
    """Whether the end-to-end suite would take these scores of a float32 server for those of other rows."""
    near, far = TOLERANCES["float32"]
    differences = [abs(one - other) for one, other in zip(scores, before, strict=True)]
    return sum(each > near for each in differences) > max(1, len(differences) // FAR_PARTS) or max(differences) > far


def accept_length(drafts: Sequence[Sequence[int]], says: Sequence[int], first: int, end: int) -> float:
    """Tokens per round within places [first, end) of a text; the one at `first` is known as the first begins."""
    place, rounds = first, 0
    while place < end - 1:
        proposed = [each[place] for each in drafts[: end - 1 - place]]
        place += 1 + agreeing(proposed, says[place:])
        rounds += 1
    return (min(place, end - 1) - first) / max(1, rounds)


def most_accepted(tokens: int, steps: int) -> float:
    """The accept length in an answer of so many tokens when every draft is accepted; the first token is known."""
    return (tokens - 1) / max(1, math.ceil((tokens - 1) / (steps + 1)))


@dataclass(frozen=True, slots=True)
class Loss:
    """What becomes of rows before a question is asked: `layers` of the target and the draft's, on which pages."""

    name: str
    layers: tuple[int, ...] = ()
    draft: bool = False
    latent: bool = False
    index: bool = False
    foreign: bool = False
    """Another request's rows instead of zeros."""
    whole: bool = False
    """All pages instead of the one that the question is about."""


def losses(layers: int) -> list[Loss]:
    """The rows of the table."""
    every = tuple(range(layers))
    return [
        Loss("nothing"),
        Loss("KV and index keys of own page foreign", every, draft=True, latent=True, index=True, foreign=True),
        Loss("KV of own page zero", every, draft=True, latent=True),
        Loss("KV of own page zero, target only", every, latent=True),
        Loss("KV of own page foreign, target only", every, latent=True, foreign=True),
        Loss("index keys of own page zero", every, draft=True, index=True),
        *(Loss(f"KV of own page zero, layer {layer}", (layer,), latent=True) for layer in every),
        *(Loss(f"index keys of own page zero, layer {layer}", (layer,), index=True) for layer in every),
        Loss("draft KV of own page zero", draft=True, latent=True),
        Loss("draft KV of own page foreign", draft=True, latent=True, foreign=True),
        Loss("draft index keys of own page zero", draft=True, index=True),
        Loss("draft index keys zero", draft=True, index=True, whole=True),
    ]


def lose(loss: Loss, cache: Cache, questions: Sequence[Question], other: Cache) -> Cache:
    """The cache, a request per question, with the loss; `other` is another request's, at least as long."""

    def edited(mine: Rows, its: Rows, *, hit: bool) -> Rows:
        for chosen, target, source in (
            (loss.latent, mine.latent, its.latent),
            (loss.index, mine.index_key, its.index_key),
        ):
            for at, question in enumerate(questions if hit and chosen else ()):
                first = max(0, question.page) * PAGE_SIZE
                place = slice(None) if loss.whole else slice(first, first + PAGE_SIZE)
                target[at, place] = source[0, : target.shape[1]][place] if loss.foreign else 0
        return mine

    if cache.draft is None or other.draft is None:
        raise ValueError("a text of one byte has no rows of the draft, expected two or more")
    pairs = zip(cache.rows, other.rows, strict=True)
    rows = tuple(edited(mine, its, hit=at in loss.layers) for at, (mine, its) in enumerate(pairs))
    return replace(cache, rows=rows, draft=edited(cache.draft, other.draft, hit=loss.draft))


def mean(values: Iterable[float]) -> float:
    """The mean, to three digits; of nothing 0."""
    every = list(values)
    return round(sum(every) / max(1, len(every)), 3)


@dataclass(frozen=True, slots=True)
class Exam:
    """A model with prefilled contexts, in float32, and what is asked about each of their pages."""

    model: TinyModel
    kinds: int
    contexts: list[tuple[bytes, list[Question]]]
    caches: list[Cache]
    """One more than is asked about: rows of another request."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: TinyModel, *, kinds: int, contexts: int, pages: int, seed: int, device: str) -> Exam:
        """The same seed makes the same contexts."""
        model.to(device).eval()
        tasks, rng = Tasks(kinds), random.Random(seed)
        made = [tasks.context(rng, pages, PAGE_SIZE) for _ in range(contexts + 1)]
        return cls(model, kinds, made, [prefill(model, text, device) for text, _ in made])

    def answers(self, loss: Loss, contexts: int) -> list[tuple[Question, Said]]:
        """Every question about the first contexts, after a loss."""
        found: list[tuple[Question, Said]] = []
        for at, cache in enumerate(self.caches[:contexts]):
            for kind in range(self.kinds):
                asked = [each for each in self.contexts[at][1] if each.layer == kind]
                hit = lose(loss, cache.copies(len(asked)), asked, self.caches[at + 1])
                found += zip(asked, ask(self.model, hit, asked), strict=True)
        return found

    def sums(self, cache: Cache) -> list[Said]:
        """All held-out sums, behind one context."""
        asked = held_out_sums()
        parts = [asked[at : at + SUMS_TOGETHER] for at in range(0, len(asked), SUMS_TOGETHER)]
        return [said for part in parts for said in ask(self.model, cache.copies(len(part)), part)]

    def table(self, contexts: int) -> dict[str, dict[str, object]]:
        """What every loss does."""
        nothing, *others = losses(len(self.model.layers))
        before = [said for _, said in self.answers(nothing, contexts)]
        rows = {}
        for loss in (nothing, *others):
            answers = self.answers(loss, contexts)
            says = [said for _, said in answers]
            rows[loss.name] = {
                "recall": mean(said.right for said in says),
                "recall_by_kind": [
                    mean(said.right for each, said in answers if each.layer == kind) for kind in range(self.kinds)
                ],
                "accept_length_cut": mean(said.accepted for said in says),
                "scores_moved": mean(moved(one.scores, other.scores) for one, other in zip(says, before, strict=True)),
                "questions": len(answers),
            }
            print(f"{loss.name:45} {json.dumps(rows[loss.name])}", flush=True)
        return rows


@torch.no_grad()
def evaluate(exam: Exam, loss_contexts: int) -> dict[str, Any]:
    """All measures, by name: recall and accept lengths, sums, and what every loss does."""
    everything = exam.answers(Loss("nothing"), len(exam.caches) - 1)
    sums = [said for cache in exam.caches[:loss_contexts] for said in exam.sums(cache)]
    uncut = []
    for question in exam.contexts[0][1][:16]:
        prompt = torch.tensor([list(question.prompt)], device=exam.caches[0].hidden.device)
        cache, _ = extend(exam.model, prompt, exam.caches[0])
        uncut += generate(exam.model, cache, len(question.answer))[1]
    return {
        "questions": len(everything),
        "right": sum(said.right for _, said in everything),
        "accept_length_cut": mean(said.accepted for _, said in everything),
        "accept_length_cut_most": mean(
            most_accepted(len(each.answer), exam.model.draft.steps) for each, _ in everything
        ),
        "accept_length_uncut": mean(uncut),
        "sums": len(sums),
        "sums_right": sum(said.right for said in sums),
        "losses": exam.table(loss_contexts),
    }


def main(arguments: list[str]) -> int:
    """Evaluate as the command line says; return the exit code."""
    parse = argparse.ArgumentParser("model_eval", description="Ask a trained tiny model, with and without lost rows.")
    parse.add_argument("weights", type=Path, help="model.safetensors; results go into model.json beside it")
    parse.add_argument("--device", default="cpu")
    parse.add_argument("--contexts", type=int, default=16, help="unseen contexts (%(default)s)")
    parse.add_argument("--loss-contexts", type=int, default=4, help="of them, asked after each loss (%(default)s)")
    parse.add_argument("--pages", type=int, default=32, help=f"of a context, {PAGE_SIZE} tokens each (%(default)s)")
    parse.add_argument("--seed", type=int, default=1000, help="of the contexts (%(default)s)")
    chosen = parse.parse_args(arguments)
    record = chosen.weights.with_suffix(".json")
    made = json.loads(record.read_text(encoding="utf-8"))
    how = {"contexts": chosen.contexts, "pages": chosen.pages, "seed": chosen.seed}
    model = load(chosen.weights)
    exam = Exam.of(model, kinds=made["kinds"], device=chosen.device, **how)
    results = evaluate(exam, chosen.loss_contexts)
    print("random weights of the same shape")
    how["contexts"] = 1
    random_weights = Exam.of(TinyModel(model.geometry, seed=1), kinds=made["kinds"], device=chosen.device, **how)
    with torch.no_grad():
        untrained = random_weights.table(1)
    how |= {"contexts": chosen.contexts, "loss_contexts": chosen.loss_contexts}
    made["evaluation"] = {**how, **results, "untrained_losses": untrained}
    print(json.dumps({name: value for name, value in results.items() if name != "losses"}))
    record.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

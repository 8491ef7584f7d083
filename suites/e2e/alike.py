"""When two answers are the same: in every token, and in every log probability within what rounding explains.

Two arms add numbers up in another order, so log probabilities differ in their last bits (`logprob_near`). Attention
that selects its tokens by a score may, at a tie, select another one: that is legal, rare, and moves one token's log
probability further (`logprob_far`), or, once in a long while, the token that is drawn. Rows of another page move
nearly all of an answer's log probabilities further than rounding does.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.case import Violation
from harness.types import AnyReply, Generate, Generated, Ok
from suites.claim import expect, require
from suites.e2e.claim import Step
from suites.e2e.story import Story, common, key_of, scored, stays

FAR_PARTS = 10  # of so many log probabilities one may be far, and one of fewer


def all_alike(step: Step) -> None:
    """Every whole request of a step is answered in full, and as the same one was answered before."""
    for op, reply in step.parts():
        if isinstance(op, Generate) and stays(op):
            value = answered(op, reply)
            alike(op, value, step.story)


def answered(op: Generate, reply: AnyReply) -> Generated:
    """The whole answer. Raises `Violation` when there is none."""
    arm = f" of the {op.arm} arm" if op.arm else ""
    if not isinstance(reply, Ok) or not isinstance(reply.value, Generated):
        seen = f"request {op.request}{arm}: {type(reply).__name__.lower()}: {getattr(reply, 'why', reply)}"
        raise Violation(seen, "an answer", f"its {len(op.tokens)} tokens fit, and nobody has ended it")
    value = reply.value
    what = f"end of request {op.request}{arm}"
    expect(value.finish, "length", what, f"only its length of {op.max_new_tokens} tokens ends it")
    for name, values in (("tokens", value.tokens), ("log probabilities", value.logprobs)):
        if values is not None:
            expect(len(values), op.max_new_tokens, f"{name} of request {op.request}{arm}", "so many were asked for")
    if value.prompt_tokens is not None:
        expect(value.prompt_tokens, len(op.tokens), f"prompt tokens of request {op.request}{arm}", "so many were sent")
    return value


def alike(op: Generate, value: Generated, story: Story) -> None:
    """Raises `Violation` unless an answer is the one that the same request got before, in whichever arm."""
    if value.first is not None and value.tokens:
        why = "decode goes on from the token that prefill has made"
        expect(value.first, value.tokens[0], f"first token of request {op.request} at the prefill worker", why)
    known = story.references.get(key_of(op))
    if known is not None:
        its, reference = known
        who = f"request {op.request} beside {its.request}" + (f" of the {its.arm} arm" if its.arm else "")
        _tokens(op, value, reference, who, story)
        story.seen["compared"] += 1
        story.seen["compared with control"] += its.arm != op.arm
    scores = dict(scored(op, value))
    before = story.scores.get(op.tokens, {})
    places = sorted(scores.keys() & before.keys())
    story.seen["prompt tokens compared"] += len(places)
    what = f"log probabilities of prompt tokens of request {op.request}"
    near([scores[place] for place in places], [before[place] for place in places], what, story, places)


def _tokens(op: Generate, value: Generated, reference: Generated, who: str, story: Story) -> None:
    mine, theirs = value.tokens, reference.tokens
    if mine is None or theirs is None:
        if value.text is not None and value.text != reference.text:
            raise Violation(f"text of {who} = {value.text!r}", repr(reference.text), "nothing else was asked")
        count = min(len(value.logprobs or ()), len(reference.logprobs or ()))
    else:
        count = common(mine, theirs)
        if mine != theirs:
            _flipped(op, f"tokens of {who} = {mine}", f"{theirs}", story)
    if value.logprobs is not None and reference.logprobs is not None:
        what = f"log probabilities of the first {count} tokens of {who}"
        near(value.logprobs[:count], reference.logprobs[:count], what, story)


def _flipped(op: Generate, seen: str, expected: str, story: Story) -> None:
    """Another token was drawn. One in a session may be a tie; a plan then asks the same with other seeds."""
    if story.flips:
        why = f"prompt and seed are the same; that of {len(story.flips)} other request(s) differs already, no rare tie"
        raise Violation(seen, expected, why)
    story.flips.append(key_of(op))
    story.seen["flip"] += 1


def near(mine: Sequence[float], theirs: Sequence[float], what: str, story: Story, places: Sequence[int] = ()) -> None:
    """Raises `Violation` unless these log probabilities are the same within the engine's tolerance."""
    small, large = story.service.logprob_near, story.service.logprob_far
    differences = [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    far = [at for at, difference in enumerate(differences) if difference > small]
    if not far:
        return
    worst = max(far, key=differences.__getitem__)
    place = places[worst] if places else worst
    allowed = _allowed(differences)
    seen = f"{what}: {len(far)} of {len(differences)} differ, most at {place}: {mine[worst]:.6f}"
    expected = f"{theirs[worst]:.6f} within {large:g}, and at most {allowed} further than {small:g}"
    require(within(differences, small, large), seen, expected, "the prompt is the same")
    story.seen["tie"] += 1


def within(differences: Sequence[float], small: float, large: float) -> bool:
    """Whether log probabilities that differ by so much are taken for the same."""
    far = [difference for difference in differences if difference > small]
    return len(far) <= _allowed(differences) and max(far, default=0.0) <= large


def _allowed(differences: Sequence[float]) -> int:
    return max(1, len(differences) // FAR_PARTS)

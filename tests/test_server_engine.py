"""kvshard_ref/server without HTTP: prompts in chunks, over ranks and transfers, give what the model alone gives."""

from __future__ import annotations

import pytest
import torch

from ci.register import register_cpu_ci
from harness.lockstep import Lockstep, LockstepGroup
from harness.transports.memory import Faults, Network
from kvshard_ref.errors import GeometryError
from kvshard_ref.model import Layer, Reading
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.server.api import Ask, Step
from kvshard_ref.server.generate import Generator
from kvshard_ref.server.sampling import logprobs, pick
from kvshard_ref.server.tensor_parallel import sliced, summed
from tests.server_rig import GEOMETRY, PS, DecodeRig, PrefillRig, ask_of, model_of, models_of, prompt_of, whole_answer

register_cpu_ci(est_time=35, stage="commit")

SHAPES = [
    (1, "sharded", "interleave"),
    (2, "sharded", "interleave"),
    (3, "sharded", "zigzag"),
    (4, "sharded", "zigzag"),
    (2, "sharded", "whole"),
    (2, "replicated", "interleave"),
]


@pytest.mark.parametrize(("ranks", "layout", "split"), SHAPES)
@pytest.mark.parametrize("length", [1, 2, PS, PS + 1, 17, 40])
def test_a_prompt_gives_the_models_next_token_and_log_probabilities(
    ranks: int, layout: str, split: str, length: int
) -> None:
    """In chunks, over any ranks, cold and from the cache, the first token and all log probabilities are the model's."""
    rig = PrefillRig(ranks, layout=layout, split=split)
    prompt = prompt_of(length, length)
    _, hidden = whole_answer(ask_of("oracle", prompt, max_new_tokens=0))
    logits = model_of().logits(hidden)

    cold = rig.serve(ask_of("a", prompt, logprob_start=0, max_new_tokens=1, logprobs=True))
    warm = rig.serve(ask_of("b", prompt, max_new_tokens=1, logprobs=True))
    rig.close()

    assert (cold.cached_device, warm.cached_device) == (0, (length - 1) // PS * PS)
    assert [cold.tokens, warm.tokens] == [(pick(ask_of("", prompt), length - 1, logits[-1]),)] * 2
    expected = [each.value for each in logprobs(prompt[1:], logits[:-1], 0)] if length > 1 else []
    assert cold.input_logprobs[0].value is None
    assert [each.value for each in cold.input_logprobs[1:]] == pytest.approx(expected, abs=1e-4)
    assert warm.logprobs[0].value == pytest.approx(cold.logprobs[0].value, abs=1e-4)


def pair(rig: PrefillRig, decode: DecodeRig, asks: list[Ask], steps_max: int = 300) -> dict[str, list[Step]]:
    """All asks through both workers at once; the decode worker's steps by rid."""
    found: dict[str, list[Step]] = {ask.rid: [] for ask in asks}
    for ask in asks:
        rig.add(ask)
        decode.add(ask)
    for _ in range(steps_max):
        rig.step()
        for step in decode.step():
            found[step.rid].append(step)
        if all(steps and steps[-1].finished for steps in found.values()):
            return found
    raise AssertionError(f"not all ended: {found}, failed {decode.failed}")


@pytest.mark.parametrize(("ranks", "layout", "split"), SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_of_a_pair_are_the_models(ranks: int, layout: str, split: str, temperature: float) -> None:
    """Prompts of all sizes, in batches, sent while they are computed: each answer is what the model alone gives."""
    network = Network(Faults(write_ticks=(3, 1, 0), message_ticks=(1, 0)))
    rig = PrefillRig(ranks, layout=layout, split=split, network=network)
    decode = DecodeRig(network, ranks if layout == "sharded" else 1)
    asks = [
        ask_of(f"r{length}", prompt_of(length, length), room=length, temperature=temperature, seed=length)
        for length in (1, 3, PS, 2 * PS + 1, 23, 33)
    ]

    found = pair(rig, decode, asks)
    again = pair(rig, decode, [ask_of("again", asks[-1].tokens, room=99, temperature=temperature, seed=33)])
    idle = (rig.used(), decode.receiver.free_pages, decode.receiver.busy)
    rig.close()

    answers = {rid: [token for step in steps for token in step.tokens] for rid, steps in found.items()}
    assert answers == {ask.rid: whole_answer(ask)[0] for ask in asks}
    assert [token for step in again["again"] for token in step.tokens] == answers["r33"]
    assert idle == ([0] * ranks, 64, False)


def test_the_draft_gets_the_rows_of_all_tokens() -> None:
    """The draft's rows that arrive are those of the text: a token's row knows the next token, over page ends too."""
    network = Network()
    rig, decode = PrefillRig(2, network=network), DecodeRig(network, 2)
    common, ends = prompt_of(1, 3 * PS), [prompt_of(seed, PS + 1) for seed in (2, 3)]
    model, pool = model_of(), decode.half.generator.pools[1]
    for number, end in enumerate(ends):  # the second one hits the pages of the first, as far as the next token agrees
        ask = ask_of(f"r{number}", (*common, *end), room=number + 1, max_new_tokens=1)
        rig.add(ask)
        decode.add(ask)
        while not decode.half.running:
            rig.step()
            for each in decode.receiver.poll():
                decode.half.begin(each.ask, each.pages)  # type: ignore[union-attr]  # it arrives
        tokens = torch.tensor([ask.tokens])
        embedded = model.embed(tokens)
        inputs = model.draft.enter(embedded[:, 1:], model.whole(embedded, sparse=True)[:, :-1])
        expected = model.draft.layer.fresh(inputs, torch.arange(len(ask.tokens) - 1))
        locs = decode.half.running[ask.rid].locs[: len(ask.tokens) - 1]
        torch.testing.assert_close(pool.rows_of(0, "draft_latent").take(locs), expected.latent[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(pool.rows_of(0, "draft_index").take(locs), expected.index_key[0], atol=1e-5, rtol=0)
        while decode.half.running:
            decode.step()
    rig.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_changes_no_answer(temperature: float) -> None:
    """With and without a draft the tokens are the same; with it fewer passes than tokens when drafts are right."""
    ask = ask_of("a", prompt_of(5, 21), max_new_tokens=20, temperature=temperature, seed=4)
    answers = []
    for draft in (False, True):
        network = Network()
        rig, decode = PrefillRig(2, draft=draft, network=network), DecodeRig(network, 2, draft=draft)
        steps = pair(rig, decode, [ask_of("a", ask.tokens, room=1, max_new_tokens=20, temperature=temperature, seed=4)])
        answers.append([token for step in steps["a"] for token in step.tokens])
        last = steps["a"][-1]
        assert last.drafted == (0 if not draft else 3 * last.verified)
        assert len(steps["a"]) + last.accepted >= len(answers[-1])
        rig.close()

    assert answers == [whole_answer(ask)[0]] * 2


def test_drafts_are_those_of_the_draft_layer() -> None:
    """Before every pass the drafts are what the unrolled draft proposes for the text so far."""
    network, model = Network(), model_of()
    rig, decode = PrefillRig(2, network=network), DecodeRig(network, 2)
    ask = ask_of("a", prompt_of(3, 23), room=1, max_new_tokens=9, temperature=1.0)
    rig.add(ask)
    decode.add(ask)
    compared = 0
    for _ in range(60):
        rig.step()
        decode.step()
        for each in decode.half.running.values():
            if each.drafts:
                text = model.embed(torch.tensor([[*each.tokens, *each.drafts]]))
                steps = model.draft.unroll(text[:, 1:], model.whole(text, sparse=True)[:, :-1], 0, None, sparse=True)
                last = len(each.tokens) - 2
                expected = [int(model.draft_logits(hidden)[0, last].argmax()) for hidden in steps]
                assert each.drafts == expected
                compared += 1
    rig.close()

    assert compared >= 3


@pytest.mark.parametrize("start", [0, 1, PS - 1, PS, PS + 1, 2 * PS, 17])
def test_scored_tokens_are_computed_anew(start: int) -> None:
    """From any token on, also with all of the prompt in the cache, the log probabilities are those of a cold prompt."""
    rig = PrefillRig(2)
    prompt = prompt_of(4, 18)
    cold = rig.serve(ask_of("cold", prompt, logprob_start=0, max_new_tokens=1))
    warm = rig.serve(ask_of("warm", prompt, logprob_start=start, max_new_tokens=0))
    rig.close()

    assert warm.cached_device == max(0, start - 1) // PS * PS
    assert [each.token for each in warm.input_logprobs] == list(prompt[start:])
    scores = [each.value for each in cold.input_logprobs[start:]]
    assert [each.value for each in warm.input_logprobs] == pytest.approx(scores, abs=1e-4)


def test_an_answer_ends_at_a_stop_token_or_at_its_length() -> None:
    """A stop token is the last one of the answer, also in the middle of accepted drafts."""
    ask = ask_of("a", prompt_of(6, 9), max_new_tokens=12, temperature=1.0, seed=1)
    tokens, _ = whole_answer(ask)
    pools = [ShardPool(0, Placement(1, PS), 16, *each) for each in models_of(draft=True)]

    for stop in (tokens[0], tokens[4]):
        rig = PrefillRig(1, network=(network := Network()))
        decode = DecodeRig(network, 1)
        stopped = ask_of("a", ask.tokens, room=1, max_new_tokens=12, temperature=1.0, seed=1, stop_tokens=(stop,))
        steps = pair(rig, decode, [stopped])["a"]
        rig.close()
        assert [token for step in steps for token in step.tokens] == tokens[: tokens.index(stop) + 1]
        assert steps[-1].finished == "stop"
    assert Generator(model_of(), pools[:1], 3).drafts == 0


@pytest.mark.parametrize("size", [2])
def test_tensor_parallel_parts_add_up(size: int) -> None:
    """Summed over the ranks, every layer gives what the whole model gives."""
    whole = model_of()
    hidden = torch.randn(1, 12, GEOMETRY.width, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(12)
    layers = [layer for layer in whole.modules() if isinstance(layer, Layer)]
    expected = [layer.read(hidden, positions, Reading(layer.fresh(hidden, positions))) for layer in layers]
    lockstep = Lockstep(size)

    def program(rank: int, group: LockstepGroup) -> list[torch.Tensor]:
        mine = [layer for layer in sliced(whole, rank, size).modules() if isinstance(layer, Layer)]
        reduce = summed(group)
        return [each.read(hidden, positions, Reading(each.fresh(hidden, positions)), reduce) for each in mine]

    for found in lockstep.run(program):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    lockstep.close()


def test_heads_must_divide() -> None:
    """A size that does not divide the heads is refused with both numbers."""
    with pytest.raises(GeometryError, match=rf"tp size 3: expected a divisor of {GEOMETRY.heads} heads"):
        sliced(model_of(), 0, 3)


def test_what_is_not_asked_for_waits() -> None:
    """A prompt is computed once its room is known; others overtake it, and the pool is not filled for nobody."""
    network = Network()
    rig, decode = PrefillRig(2, network=network, pages=8), DecodeRig(network, 2)
    orphans = [ask_of(f"orphan{number}", prompt_of(30 + number, 60), room=50 + number) for number in range(3)]
    for orphan in orphans:
        rig.add(orphan)
    found = pair(rig, decode, [ask_of("a", prompt_of(5, 60), room=1)])
    used = rig.used()
    waiting = [rank.unheard() for rank in rig.ranks]
    rig.close()

    assert [token for step in found["a"] for token in step.tokens] == whole_answer(ask_of("a", prompt_of(5, 60)))[0]
    assert (used, waiting) == ([0, 0], [[orphan.rid for orphan in orphans]] * 2)


def test_a_refusal_is_told_to_the_decode_worker() -> None:
    """A prompt that never fits, or that is aborted while it waits, fails at the decode worker with its reason."""
    network = Network()
    rig, decode = PrefillRig(2, network=network, pages=8), DecodeRig(network, 2)
    large = ask_of("large", prompt_of(1, 100), room=1)
    rig.add(large)
    decode.add(large)
    steps: list[Step] = []
    for _ in range(8):
        decode.step()
        steps += rig.step()
    aborted = ask_of("aborted", prompt_of(2, 20), room=2)
    decode.add(aborted)
    decode.step()
    for rank in rig.ranks:
        rank.waiting.append(aborted)
    rig.lockstep.run(lambda rank, _: rig.ranks[rank].worker.progress())
    rig.abort("aborted")
    for _ in range(8):
        steps += rig.step()
        decode.step()
    rig.close()

    assert [(step.rid, step.status) for step in steps] == [("large", 400)]
    assert [each.ask.rid for each in decode.failed] == ["large", "aborted"]
    assert "needs 25 pages, the pool has 16" in decode.failed[0].why
    assert "'aborted' was aborted" in decode.failed[1].why
    assert (decode.receiver.busy, decode.receiver.free_pages) == (False, 64)


def test_a_host_hit_gives_the_same_answer() -> None:
    """A prefix that comes back from the host gives what a cold one gives, draft rows included."""
    network = Network()
    rig, decode = PrefillRig(2, network=network, pages=8, host_pages=64), DecodeRig(network, 2)
    ask = ask_of("cold", prompt_of(7, 25), room=1, temperature=1.0)
    pair(rig, decode, [ask])
    for number in range(4):
        pair(rig, decode, [ask_of(f"o{number}", prompt_of(20 + number, 30), room=10 + number)])
    rig.add(warm := ask_of("warm", ask.tokens, room=2, temperature=1.0))
    decode.add(warm)
    steps: list[Step] = []
    while not (steps and steps[-1].finished):
        rig.step()
        for job in rig.ranks[0].jobs.values():
            assert (job.cached_host > 0, job.cached) == (True, 24)
        steps += decode.step()
    rig.close()

    assert [token for step in steps for token in step.tokens] == whole_answer(ask)[0]


@pytest.mark.parametrize("early", [False, True], ids=["room later", "room first"])
@pytest.mark.parametrize("ticks", [0, 4, 5, 7, 10])
@pytest.mark.parametrize("tokens", [6, 20])
def test_decode_may_give_up_at_any_moment(tokens: int, ticks: int, *, early: bool) -> None:
    """Whatever prefill does when it hears of it, the prompt ends there as well, once, and the next one is right."""
    network = Network(Faults(message_ticks=(ticks,)))
    rig, decode = PrefillRig(2, network=network, chunk_tokens=8), DecodeRig(network, 2)

    def both(count: int) -> list[Step]:
        return [step for _ in range(count) for step in (*decode.step(), *rig.step())]

    for after in range(8):
        ask = ask_of(f"a{after}", prompt_of(after, tokens), room=after + 1)
        decode.add(ask)
        both(12 if early else 0)
        rig.add(ask)
        steps = both(after)
        decode.half.abort(ask.rid)
        decode.receiver.abort(ask.rid)
        if not any(step.finished for step in steps):
            steps += both(30)
            rig.abort(ask.rid)  # as its face does; nothing is left to end when prefill has heard of it
        assert len([step for step in steps if step.finished]) <= 1
        both(30)
        assert (rig.used(), decode.receiver.free_pages, decode.receiver.busy) == ([0, 0], 64, False)
    found = pair(rig, decode, [ask_of("b", prompt_of(0, tokens), room=99)])
    rig.close()
    assert [token for step in found["b"] for token in step.tokens] == whole_answer(ask_of("b", prompt_of(0, tokens)))[0]


@pytest.mark.parametrize("after", range(7))
def test_an_abort_leaves_nothing_behind(after: int) -> None:
    """Aborted on both sides after any number of steps, all pages are free or cached, and the next ask is right."""
    network = Network(Faults(write_ticks=(4,), message_ticks=(1,)))
    rig, decode = PrefillRig(2, network=network), DecodeRig(network, 2)
    ask = ask_of("a", prompt_of(8, 40), room=1)
    rig.add(ask)
    decode.add(ask)
    for _ in range(after):
        rig.step()
        decode.step()
    rig.abort("a")
    decode.half.abort("a")
    decode.receiver.abort("a")
    for _ in range(30):
        rig.step()
        decode.step()

    assert (rig.used(), decode.receiver.free_pages, decode.receiver.busy) == ([0, 0], 64, False)
    found = pair(rig, decode, [ask_of("b", ask.tokens, room=2)])
    rig.close()
    assert [token for step in found["b"] for token in step.tokens] == whole_answer(ask)[0]


@pytest.mark.parametrize("after", [2, 3, 4])
def test_a_transfer_that_fails_is_told(after: int) -> None:
    """When the decode worker is gone in the middle the ask ends with that reason, and holds nothing."""
    network = Network(Faults(write_ticks=(9,)))
    rig, decode = PrefillRig(2, network=network), DecodeRig(network, 2)
    ask = ask_of("a", prompt_of(9, 40), room=1)
    rig.add(ask)
    decode.add(ask)
    steps: list[Step] = []
    for number in range(60):
        steps += rig.step()
        if number == after:
            network.lose(network.ends["decode"])
        elif number < after:
            decode.step()
    idle = rig.used()
    rig.close()

    assert [(step.rid, step.finished, step.status, step.tokens) for step in steps] == [("a", "abort", 500, ())]
    assert "'decode' is lost" in steps[0].error
    assert idle == [0, 0]

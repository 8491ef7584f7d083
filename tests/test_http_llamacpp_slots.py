"""llama.cpp's slots as a second tier: saved after an answer, restored once no slot holds the prompt, and judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ci.register import register_cpu_ci
from harness.adapter import Session
from harness.connect import close, connect
from harness.suite import all_cases, case_by_id
from harness.types import Flush, Generate, Generated, Ok, Unknown, Verdict
from tests.fake_llama import FAULTS, Slots, slotted
from tests.test_e2e import judged

register_cpu_ci(est_time=10, stage="commit")

MADE = case_by_id("host.answers_as_computed", all_cases(("e2e",)))
PROMPTS = [tuple(range(start, start + 20)) for start in (20, 60, 100, 140)]


@contextmanager
def session(tier: int = 4096) -> Iterator[tuple[Session, Slots]]:
    """A session on a right server, and what it holds."""
    with slotted(tier=tier) as (address, slots):
        engine = connect(address)
        try:
            fixed = engine.describe().axes.fixed
            assert fixed is not None
            yield engine.open(fixed), slots
        finally:
            close(engine)


def hits(opened: Session, *prompts: tuple[int, ...]) -> list[tuple[int | None, int | None]]:
    """Cached tokens of each prompt in turn, on the device and on the host."""
    found = []
    for at, tokens in enumerate(prompts):
        reply = opened.apply(Generate(request=f"r{at}", tokens=tokens, max_new_tokens=2, seed=1))
        assert isinstance(reply, Ok), reply
        assert isinstance(reply.value, Generated)
        found.append((reply.value.cached_device, reply.value.cached_host))
    return found


def test_a_tier_is_claimed_where_the_server_is_tagged() -> None:
    """Its size is that of the tag; every answered prompt gets a copy, and hits are told apart."""
    with slotted(tier=512) as (address, _):
        manifest = connect(address).describe()

    assert manifest.axes.fixed is not None
    assert (512, 512) == (manifest.axes.fixed.host_pages_per_rank, manifest.axes.fixed.pages_per_rank)
    assert {"splits_cached", "keeps_copies", "copies_all"} <= set(manifest.promises)


def test_what_has_left_its_slot_comes_back() -> None:
    """With two slots the third prompt takes the first one's; that comes back, the others have stayed."""
    with session() as (opened, _):
        found = hits(opened, *PROMPTS[:3], PROMPTS[2], PROMPTS[0], PROMPTS[2])

    assert [(0, 0), (0, 0), (0, 0), (19, 0), (0, 19), (19, 0)] == found


def test_the_longest_start_comes_back() -> None:
    """A prompt that goes on from a saved one finds the start of it."""
    with session() as (opened, _):
        found = hits(opened, *PROMPTS[:3], (*PROMPTS[0], 9, 9, 9))

    assert (0, 20) == found[-1]


def test_the_oldest_file_makes_room() -> None:
    """No more tokens are kept than the tag allows, and files are used again."""
    with session(tier=50) as (opened, slots):
        found = hits(opened, *PROMPTS, PROMPTS[0])
        used = opened.snapshot().ranks[0].counters

    assert (0, 0) == found[-1]
    assert 2 == len(slots.files)
    assert used is not None
    assert 40 == used["hicache_host_used_tokens"]


def test_a_flush_forgets_the_files() -> None:
    """Nothing comes back after it."""
    with session() as (opened, _):
        hits(opened, *PROMPTS[:3])
        opened.apply(Flush())
        assert [(0, 0)] == hits(opened, PROMPTS[0])


def test_a_slot_that_cannot_be_restored_is_told() -> None:
    """It is no miss: nobody knows what the slot holds."""
    with session() as (opened, slots):
        hits(opened, *PROMPTS[:3])
        slots.fault = "cannot restore"
        reply = opened.apply(Generate(request="r9", tokens=PROMPTS[0], max_new_tokens=2, seed=1))

    assert isinstance(reply, Unknown)
    assert "restore of slot 1: HTTP 400: Unable to restore slot" in reply.why


def test_a_right_tier_passes() -> None:
    """The case of the host tier is run, not skipped."""
    with slotted() as (address, _):
        result = judged(MADE, address)

    assert (Verdict.PASS, "") == (result.verdict, result.why)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_tier_is_caught(fault: str) -> None:
    """A miss where a file was, rows of another prompt, and a refusal all fail the case."""
    seen = {"restores rows of another file": "of request", "cannot restore": "unknown: "}
    with slotted(fault) as (address, _):
        result = judged(MADE, address)

    assert Verdict.FAIL == result.verdict, result.why
    assert seen.get(fault, "cached tokens of request") in result.why
    assert ("cached tokens" in result.why) == (fault in FAULTS[:2])

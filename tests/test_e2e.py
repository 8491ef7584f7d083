"""The cases about servers: a right pair passes each, and each fails for the fault that it is about."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci
from harness.case import Case
from harness.connect import close, connect
from harness.describing import text
from harness.result import CaseResult
from harness.runner import add_arguments, run
from harness.suite import all_cases, case_by_id
from harness.trace import replay
from harness.trial import Budget, Trial
from harness.types import Verdict
from harness.usage import UserError
from tests.fake_operator import operated
from tests.fake_server import pair

register_cpu_ci(est_time=70, stage="commit")

CASES = all_cases(("e2e",))
ENDING = ("death.", "restart.")  # cases that end processes
IN_TURN = "handover."  # those of pairs whose halves are asked in turn, for which tests/test_http_vllm.py is
HALVES: dict[str, Any] = {"wait_seconds": 0.4, "timeout": 4.0}  # what a case waits for in full
BUDGET = Budget("smoke", examples=5, steps_max=10, shrink_seconds=0.2)


def judged(made: Case, address: str) -> CaseResult:
    engine = connect(address)
    try:
        return Trial(made, engine, address, BUDGET, seed=1).run()[0]
    finally:
        close(engine)


def servers(name: str, *faults: str) -> AbstractContextManager[str]:
    """What a case of that name is for."""
    if name.startswith(ENDING):
        return operated(*faults, **HALVES)
    return pair(*faults, **(HALVES if name.startswith("orphan.") else {}))


@pytest.mark.parametrize("made", CASES, ids=lambda made: made.id)
def test_a_right_pair_passes(made: Case) -> None:
    """No case complains about servers that are right, and each sees what it must have seen."""
    with servers(made.id) as address:
        result = judged(made, address)

    if made.id.startswith(IN_TURN):
        assert "promise.hands_over" in result.why
        return
    assert (Verdict.PASS, "") == (result.verdict, result.why)
    assert 1 == result.examples


@pytest.mark.parametrize("made", [made for made in CASES if made.id.startswith(ENDING)], ids=lambda made: made.id)
def test_a_plain_worker_that_ends(made: Case) -> None:
    """One worker that does all passes too; what is about prefill alone is not for it."""
    with operated(plain=True) as address:
        result = judged(made, address)

    assert (Verdict.SKIP if "prefill" in made.id else Verdict.PASS) == result.verdict, result


def test_nobody_ends_processes_unasked() -> None:
    """Without `operate` these cases are skipped."""
    with pair() as address:
        verdicts = {judged(made, address).verdict for made in CASES if made.id.startswith(ENDING)}

    assert {Verdict.SKIP} == verdicts


CAUGHT = [
    ("parity.answers_as_control", "drops the last token", "tokens of request"),
    ("parity.answers_as_control", "swaps pages of later chunks", "of request"),
    ("parity.answers_as_control", "draws with other seeds later", "tokens of request"),
    ("parity.scores_as_control", "shifts later scores", "log probabilities of prompt tokens"),
    ("parity.scores_as_control", "swaps pages of later chunks", "log probabilities of prompt tokens"),
    ("cache.answers_as_computed", "swaps cached pages", "tokens of request"),
    ("cache.counts_whole_pages", "tells too many cached", "cached tokens of request"),
    ("cache.counts_whole_pages", "never hits", "0 cached tokens of request"),
    ("cache.counts_whole_pages", "keeps the cache at a flush", "cached tokens of request"),
    ("cache.batch_as_alone", "mixes a batch", "of request"),
    ("cache.every_length_hits", "never hits", "0 cached tokens of request"),
    ("cache.every_length_hits", "tells too many cached", "cached tokens of request"),
    ("cache.answers_under_pressure", "finds evicted pages", "of request"),
    ("cache.answers_under_pressure", "swaps cached pages", "of request"),
    ("cache.salts_apart", "ignores salts", "and salt 'blue'"),
    ("cache.salts_apart", "compares salts in part", "and salt 'blue1'"),
    ("cache.salts_apart", "salts every request", "0 cached tokens of request"),
    ("counters.only_grow", "starts its counters over", "generation_tokens_total of rank 2"),
    ("counters.cached_tokens_add_up", "counts hits twice", "counts as cached on the device"),
    ("counters.sent_bytes_add_up", "every rank sends all", "bytes sent past whole pages"),
    ("counters.sent_bytes_add_up", "one rank sends all", "bytes sent by rank"),
    ("capacity.ranks_add_up", "tells one rank's capacity", "tokens of the worker"),
    ("capacity.ranks_add_up", "refuses what one rank lacks", "HTTP 400: too long"),
    ("abort.leaves_nothing", "leaks pages of ended prompts", "num_used_tokens of prefill rank"),
    ("abort.leaves_nothing", "leaks pages of ended answers", "of decode rank"),
    ("abort.leaves_nothing", "keeps what ended prompts were promised", "HTTP 400: too long"),
    ("abort.by_leaving", "answers who has left", "tokens made for request"),
    ("abort.by_leaving", "leaks pages of ended prompts", "num_used_tokens of prefill rank"),
    ("abort.by_leaving", "leaks pages of ended answers", "of decode rank"),
    ("abort.by_leaving", "keeps what ended prompts were promised", "HTTP 400: too long"),
    ("flush.waits_for_requests", "flushes in flight", "a flush beside a request in flight: ok"),
    ("flush.waits_for_requests", "keeps the cache at a flush", "cached tokens of request"),
    ("load.answers_as_alone", "loses one of a crowd", "HTTP 504: lost"),
    ("load.answers_as_alone", "gets worse in a crowd", "log probabilities of the first"),
    ("orphan.ends_in_time", "waits for ever", "half alone: unknown"),
    ("orphan.ends_in_time", "leaks pages of orphans", "num_used_tokens of prefill rank"),
    ("restart.answers_as_before", "finds the cache of the process before", "cached tokens of request"),
    ("restart.answers_as_before", "knows one process of its peer", "HTTP 504: the other half has died"),
    ("death.rank_of_prefill", "lives on without a rank", "is there 3 s after the end of its rank"),
    ("death.rank_of_prefill", "waits for ever", "with prefill gone: Unknown"),
    ("death.rank_that_answers", "lives on without a rank", "is there 3 s after the end of its rank"),
    ("death.rank_that_answers", "ends a stream as if it were whole", "tokens of request"),
    ("death.prefill", "reads what has not come", "tokens of request"),
    ("death.worker_that_answers", "leaks pages of orphans", "num_used_tokens of prefill rank"),
    ("host.answers_as_computed", "rotates rows on the host", "of request"),
    ("host.answers_as_computed", "forgets the host", "cached tokens of request"),
    ("host.ranks_carry_their_share", "every rank copies all", "bytes copied to the host"),
    ("host.ranks_carry_their_share", "one rank brings all back", "bytes brought back by ranks"),
    ("host.ranks_carry_their_share", "counts what comes back twice", "load_back_tokens_total of ranks grew by"),
    ("parity.draft_accepts_as_control", "sends no draft rows", "passes that verified a draft"),
    ("host.draft_accepts_alike", "loses draft rows on the host", "passes that verified a draft"),
    ("recall.every_page_is_read", "swaps cached pages", "answer about page"),
    ("recall.every_page_is_read", "rotates rows on the host", "answer about page"),
    ("recall.every_page_is_read", "drops the last token", "tokens of request"),
    ("recall.drafts_read_every_page", "sends no draft rows", "passes that verified a draft"),
    ("recall.drafts_read_every_page", "loses draft rows on the host", "passes that verified a draft"),
]


@pytest.mark.parametrize(("name", "fault", "part"), CAUGHT, ids=[f"{name}-{fault}" for name, fault, _ in CAUGHT])
def test_a_fault_is_caught(name: str, fault: str, part: str) -> None:
    """A case fails for the fault that it is about, and says what it saw."""
    with servers(name, fault) as address:
        result = judged(case_by_id(name, CASES), address)

    assert Verdict.FAIL == result.verdict, result
    assert result.failure is not None
    assert part in result.failure.seen


def test_a_server_may_be_late_to_know() -> None:
    """A machine that is busy makes whole answers before it can know that their clients have gone: twice is no fault."""
    with pair("is late twice") as address:
        result = judged(case_by_id("abort.by_leaving", CASES), address)

    assert Verdict.PASS == result.verdict, result


def test_a_counterexample_replays() -> None:
    """What failed fails again from its ops alone, and not on a right pair."""
    made = case_by_id("cache.answers_as_computed", CASES)
    with pair("swaps cached pages") as address:
        engine = connect(address)
        budget = Budget("smoke", examples=5, steps_max=10, shrink_seconds=5)
        _, found = Trial(made, engine, address, budget, seed=1).run()
        assert found is not None
        ops = [step.op for step in found.steps]
        _, violation = replay(made, engine, found.header.config, ops)
    with pair() as address:
        _, nothing = replay(made, connect(address), found.header.config, ops)

    assert violation is not None
    assert nothing is None
    assert len(ops) <= 12  # of 23; four when there is time to try all


def test_other_suites_are_not_for_servers() -> None:
    """A case that opens sessions of its own is skipped, and says what to do."""
    with pair() as address:
        result = judged(all_cases()[0], address)

    assert Verdict.SKIP == result.verdict


def test_a_run_goes_in_turn() -> None:
    """Cases share the server's cache, so several jobs are refused."""
    with pytest.raises(UserError, match="a server has one cache, so cases go in turn"):
        run(parsed("http://127.0.0.1:1", "--jobs", "2"))


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(words))


def test_the_page_is_generated() -> None:
    """docs/e2e.md is what `kvshard describe --markdown --suite e2e` prints."""
    assert text(None, "e2e", as_markdown=True) == (Path(__file__).parent.parent / "docs" / "e2e.md").read_text()


def test_every_case_was_seen_failing() -> None:
    """No case is left that nothing was planted for."""
    assert {made.id for made in CASES if not made.id.startswith(IN_TURN)} == {name for name, _, _ in CAUGHT}

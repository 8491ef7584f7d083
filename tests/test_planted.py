"""Faults that a proxy plants in front of a server: what each changes, which cases catch it, what a right one shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec import structs

from ci.planted import code, main
from ci.planted_faults import CONTENT, FAULTS, NOTHING, Hit
from ci.planted_page import line, page
from ci.planted_proxy import Seen, mended, with_more
from ci.planted_trial import Distances, Fate, distances, fates
from ci.register import register_cpu_ci
from harness.suite import all_cases, case_by_id
from tests.fake_server import served
from tests.fake_vllm import handing_over
from tests.fake_worker import World

register_cpu_ci(est_time=40, stage="commit")

CASES = all_cases(("e2e",))
FEW = [
    case_by_id(name, CASES)
    for name in ("cache.answers_as_computed", "cache.every_length_hits", "cache.salts_apart", "abort.by_leaving")
]
HIT = Hit(tokens=(1, 2, 3, 4, 5, 6, 7, 8, 9), cached=8, page=2, earlier=((1, 2), (1, 2, 30, 40, 50)))
FATE = Fate(engine="ref", fault="stale_page", near=1e-4, far=0.02, planted=3, caught=("cache.a",), seen="a token")
CLEAN = structs.replace(FATE, fault=NOTHING, planted=0, caught=(), passed=("cache.a",))


@contextmanager
def judged(fault: str) -> Iterator[list[Fate]]:
    """What became of a right worker with nothing and with this fault in front of it."""
    plain = World(sharded=False, host=False, draft=False)
    with served(plain, "null") as (url,), served(World(sharded=False, host=False), "null") as (control,):
        options = f"dialect=sglang&control={control}&settle=3&promises=salts"
        yield list(fates("fake", url, options, [fault], FEW, seed=1))


@contextmanager
def judged_pair(fault: str) -> Iterator[list[Fate]]:
    """The same of a right pair that hands over; the proxy stands before its decode worker."""
    with handing_over() as address:
        url, options = address.split("?", 1)
        seen = "&".join(word for word in options.split("&") if not word.startswith("operate="))
        yield list(fates("fake pair", url, seen, [fault], FEW, seed=1))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("swapped_page", (3, 4, 1, 2, 5, 6, 7, 8, 9)),
        ("stale_page", (1, 2, 30, 40, 5, 6, 7, 8, 9)),
        ("lost_page", (1, 2, 5, 6, 7, 8, 9)),
        ("lost_last_token", (1, 2, 3, 4, 5, 6, 7, 9)),
    ],
)
def test_what_is_read(fault: str, expected: tuple[int, ...]) -> None:
    """The prompt whose rows a wrong cache would read; all that is computed behind the hit stays."""
    change = FAULTS[fault].change
    assert change is not None

    assert expected == change(HIT)
    assert change(Hit(tokens=(1, 1, 1), cached=0, page=2)) is None


def test_pages_that_are_the_same_cannot_be_swapped() -> None:
    """Nothing is planted that would change nothing."""
    change = FAULTS["swapped_page"].change
    assert change is not None

    assert change(Hit(tokens=(1, 2, 1, 2, 5), cached=4, page=2)) is None


@pytest.mark.parametrize(
    "right",
    [
        {"tokens_evaluated": 9, "timings": {"cache_n": 8, "prompt_n": 1}, "content": "a"},
        {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}, "content": "a"},
        {"meta_info": {"prompt_tokens": 9, "cached_tokens": 8, "cached_tokens_details": {"device": 8}}, "content": "a"},
    ],
)
def test_only_its_content_betrays_an_answer(right: dict[str, object]) -> None:
    """What an answer says of prompt and cache is that of the right one, in every dialect."""
    text = json.dumps(right).replace("9", "7").replace("8", "0")
    wrong = {**json.loads(text), "content": "b"}

    assert {**right, "content": "b"} == mended(wrong, right)
    assert json.dumps(right).replace("8", "10", 1) == json.dumps(with_more(right, 2)).replace(
        '"device": 10', '"device": 8'
    )


def test_a_right_server_behind_the_proxy_passes() -> None:
    """Streams, clients that leave and salts go through as they are, and faults are measured that are in no answer."""
    with judged(NOTHING) as (its,):
        pass

    assert ((), "", len(FEW)) == (its.caught, its.why, len(its.passed))
    assert its.distances.compared > 5
    assert its.distances.compared == its.distances.missed  # all within the tolerance
    assert 0.0 == its.distances.most


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != NOTHING])
def test_each_is_caught(fault: str) -> None:
    """Every case that is about a fault fails for it."""
    with judged(fault) as (its,):
        pass

    assert tuple(made.id for made in FEW if made.id in FAULTS[fault].cases) == its.caught, line(its)
    assert its.planted > 0


def test_before_decode_all_that_is_handed_over_is_hit() -> None:
    """A proxy before decode changes what prefill has made of a prompt, whatever decode says of hits."""
    with judged_pair("lost_page") as (its,):
        pass

    assert ("cache.answers_as_computed", "cache.every_length_hits") == its.caught[:2], line(its)
    assert () == FAULTS["wrong_count"].asked(pair=True) == FAULTS["no_salt"].asked(pair=True)
    assert {"parity.answers_as_control"} < set(FAULTS["lost_page"].asked(pair=True)) > set(CONTENT)


def test_how_far_answers_were_off() -> None:
    """One log probability in ten may be further than near; an answer with another token is no miss."""
    hits = [
        Seen(8, (1e-6, 2e-6), other_token=False),
        Seen(8, (1e-6, 0.01), other_token=False),
        Seen(8, (0.03, 1e-6), other_token=False),
        Seen(8, (0.4, 0.4), other_token=False),
        Seen(8, (), other_token=True),
    ]
    its = distances(hits, near=1e-4, far=0.02)

    assert Distances(
        compared=5, other_token=1, least=2e-6, middle=0.02, most=0.4, missed=2, missed_loose=3
    ) == structs.replace(its, middle=round(its.middle, 9))


def test_exit_codes() -> None:
    """0 all caught; 1 one was not, or a case failed without a fault; 2 one was never there."""
    assert 0 == code([CLEAN, FATE])
    assert 1 == code([CLEAN, structs.replace(FATE, caught=(), passed=("cache.a",))])
    assert 1 == code([structs.replace(CLEAN, caught=("cache.a",))])
    assert 2 == code([structs.replace(FATE, why="it was never there")])
    assert 0 == code([structs.replace(FATE, caught=(), skipped=1)])  # no case about it is for this engine


def test_the_page() -> None:
    """A row each, with the distance where there is one; what is not for an engine has none."""
    far = Distances(compared=4, other_token=1, least=0.001, middle=0.1, most=1, missed=0, missed_loose=2)
    text = page([CLEAN, structs.replace(FATE, distances=far), structs.replace(FATE, fault="no_salt", caught=())], "D")

    assert "| ref | `stale_page` | 4 | 1.0e-03, 1.0e-01, 1.0e+00 | 1 | 0 | 2 | 1 of 1 fail |" in text
    assert "| ref | `no_salt`" not in text
    assert "Tolerances: ref 0.0001, now and then 0.02" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [(["nobody"], "'nobody'; expected one of ref"), (["ref", "--only", "x"], "'x'; expected one of nothing")],
)
def test_wrong_words(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not known is named, with what is."""
    assert 3 == main(words)
    assert why in capsys.readouterr().err


def test_every_kind_of_fault_is_there() -> None:
    """A swapped page, a stale one and a lost last token are faults of content."""
    assert {"swapped_page", "stale_page", "lost_last_token"} <= {
        name for name, planted in FAULTS.items() if planted.cases == CONTENT
    }

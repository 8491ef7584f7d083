"""The trace reader and the traffic generator."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest

from ci.register import register_cpu_ci
from harness.traffic import BLOCK_TOKENS, Request, TrafficError, _Session, _turn, generate, read_trace

register_cpu_ci(est_time=10, stage="commit")

GOOD = '{"timestamp": 5, "input_length": 513, "output_length": 7, "hash_ids": [0, 1]}'


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_reads_the_fields(tmp_path: Path) -> None:
    """A line becomes a Request, in file order; equal timestamps are fine."""
    path = write(tmp_path, GOOD, GOOD.replace("7", "9"))
    assert list(read_trace(path)) == [Request(5, 513, 7, (0, 1)), Request(5, 513, 9, (0, 1))]


def test_last_line_needs_no_newline(tmp_path: Path) -> None:
    """A file that ends without a newline loses no request."""
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD)
    assert len(list(read_trace(path))) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        (GOOD[:40], "is not JSON"),
        ("", "is blank"),
        ("7", "Expected `object`"),
        ('{"timestamp": 5, "input_length": 513, "output_length": 7}', "missing required field `hash_ids`"),
        (GOOD.replace("}", ', "user": 3}'), "unknown field `user`"),
        (GOOD.replace("513", "-513"), "Expected `int` >= 1 - at `$.input_length`"),
        (GOOD.replace("513", "0").replace("0, 1", ""), "Expected `int` >= 1 - at `$.input_length`"),
        (GOOD.replace("513", '"513"'), "Expected `int`, got `str` - at `$.input_length`"),
        (GOOD.replace("7", "-7"), "Expected `int` >= 0 - at `$.output_length`"),
        (GOOD.replace("5,", "-5,"), "Expected `int` >= 0 - at `$.timestamp`"),
        (GOOD.replace("0, 1", "0, -1"), "Expected `int` >= 0 - at `$.hash_ids["),
        (GOOD.replace("0, 1", "0"), "has 1 hash_ids; expected 2"),
        (GOOD.replace("513", "512"), "has 2 hash_ids; expected 1"),
        (GOOD.replace("5,", "4,"), "timestamp 4 is before the previous line's 5"),
    ],
)
def test_malformed_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    """A malformed line is one error that names file, line number and reason; the lines before it were read."""
    path = write(tmp_path, GOOD, GOOD, line, GOOD)
    seen: list[Request] = []
    with pytest.raises(TrafficError) as caught:
        seen.extend(read_trace(path))
    assert str(caught.value).startswith(f"{path} line 3: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reader_streams(tmp_path: Path) -> None:
    """A request is handed over before the lines after it are looked at."""
    requests = read_trace(write(tmp_path, GOOD, "{"))
    assert next(requests).input_length == 513
    with pytest.raises(TrafficError, match="line 2"):
        next(requests)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    """A binary file is a malformed line, not a crash."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(TrafficError, match="line 1: is not JSON"):
        list(read_trace(path))


def test_empty_file_is_an_error(tmp_path: Path) -> None:
    """No request at all is not a trace."""
    with pytest.raises(TrafficError, match="is empty"):
        list(read_trace(write(tmp_path)))


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    """A missing file and a folder are named."""
    with pytest.raises(TrafficError, match=r"absent\.jsonl: cannot be read: No such file"):
        list(read_trace(tmp_path / "absent.jsonl"))
    with pytest.raises(TrafficError, match="cannot be read: Is a directory"):
        list(read_trace(tmp_path))


def test_generator_is_deterministic() -> None:
    """The same seed gives the same requests, another seed others, and a longer run begins with the shorter one."""
    longer = list(generate(7, 300))
    assert list(generate(7, 300)) == longer
    assert list(generate(7, 100)) == longer[:100]
    assert list(generate(8, 300)) != longer


def test_generator_is_pinned() -> None:
    """A seed's traffic stays what it is from version to version, so that reports can be compared."""
    assert [(r.timestamp, r.input_length, r.output_length, len(r.hash_ids)) for r in generate(0, 3)] == [
        (0, 4667, 899, 10),
        (273, 1071, 212, 3),
        (439, 5755, 34, 12),
    ]


def test_generated_traffic_is_a_valid_trace(tmp_path: Path) -> None:
    """Written as JSONL, generated traffic reads back unchanged: fields, number of ids, ascending timestamps."""
    requests = list(generate(1, 500))
    path = write(tmp_path, *(msgspec.json.encode(request).decode() for request in requests))
    assert list(read_trace(path)) == requests
    assert requests[0].timestamp == 0
    assert max(request.input_length + request.output_length for request in requests) <= 131_072


def test_generated_ids_stand_for_prefixes() -> None:
    """An id always follows the same id, and ids are numbered from 0 by first occurrence: they name whole prefixes."""
    before: dict[int, int | None] = {}
    for request in generate(2, 1000):
        for previous, block in itertools.pairwise((None, *request.hash_ids)):
            assert block is not None
            assert before.setdefault(block, previous) == previous
    assert list(before) == list(range(len(before)))


def test_generated_turns_append_the_answer() -> None:
    """A turn keeps the whole blocks of the one before, not the partial one, and is longer than prompt and answer."""
    draw, fresh = random.Random(0), itertools.count(1)
    session = _Session(system=0, blocks=[0], tokens=740, turns_left=10, opening=False)
    turns = [_turn(draw, session, 0, fresh) for _ in range(10)]
    for earlier, later in itertools.pairwise(turns):
        whole = earlier.input_length // BLOCK_TOKENS
        assert later.input_length > earlier.input_length + earlier.output_length
        assert later.hash_ids[:whole] == earlier.hash_ids[:whole]
        assert not set(earlier.hash_ids[whole:]) & set(later.hash_ids)


def test_generated_traffic_has_the_shape_of_chat() -> None:
    """System prompts are shared by many sessions, lengths have a heavy tail, and the cache can hit and can miss."""
    requests = list(generate(0, 2000))
    lengths = sorted(request.input_length for request in requests)
    first_blocks = {request.hash_ids[0] for request in requests if request.input_length >= BLOCK_TOKENS}
    assert len(first_blocks) < len(requests) / 5
    assert lengths[-20] > 8 * lengths[1000]
    blocks = [block for request in requests for block in request.hash_ids]
    assert 0.2 < 1 - len(set(blocks)) / len(blocks) < 0.8

"""A record says everything of a run, or it says that it is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ci.register import register_cpu_ci
from harness import provenance
from harness.record import (
    DuplicateCase,
    Footer,
    Header,
    MalformedLine,
    MissingFooter,
    Record,
    RecordError,
    WrongFooter,
    WrongFormat,
    counts,
    read,
    write,
)
from harness.result import CaseResult, Failure, exit_code, message
from harness.types import Verdict

register_cpu_ci(est_time=10, stage="commit")

ROOT = Path(__file__).parent.parent
FAILURE = Failure(
    claim="A claim.",
    seen="3",
    expected="2",
    why="so",
    config="N=2",
    ops=("open a", "finish a"),
    replay="kvshard replay x",
)
RESULTS = (
    CaseResult(case="a.one", verdict=Verdict.PASS, examples=3, ops=9, seconds=0.5, seen={"hit": 2}),
    CaseResult(case="a.two", verdict=Verdict.FAIL, why="3", failure=FAILURE),
)


def sample(results: tuple[CaseResult, ...] = RESULTS) -> Record:
    header = Header(
        kvshard="0.1.0",
        engine="mini",
        engine_version="1.0",
        engine_options={"shards": "4"},
        budget="smoke",
        seed=7,
        seed_origin="given",
        commit=None,
        versions={"python": "3.11"},
        options={"jobs": "2"},
        environment={"CI": "1"},
        started="2025-01-01T00:00:00+00:00",
    )
    return Record(header=header, results=results, footer=Footer(counts=counts(results), seconds=1.5, exit_code=1))


def test_a_record_survives_the_round_trip(tmp_path: Path) -> None:
    """What is written is read again, and nothing else is left in the folder."""
    path = tmp_path / "deep" / "run.jsonl"

    write(path, sample())

    assert read(path) == sample()
    assert [file.name for file in path.parent.iterdir()] == ["run.jsonl"]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A folder in the way is a named error, and no temporary file stays."""
    (tmp_path / "run.jsonl").mkdir()

    with pytest.raises(RecordError, match="cannot be written"):
        write(tmp_path / "run.jsonl", sample())

    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


def lines_of(tmp_path: Path) -> list[bytes]:
    write(tmp_path / "run.jsonl", sample())
    return (tmp_path / "run.jsonl").read_bytes().splitlines()


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        (lambda lines: [], WrongFormat, ":1: no header of a record"),
        (lambda lines: lines[1:], WrongFormat, ":1: no header of a record"),
        (
            lambda lines: [lines[0].replace(b'"kvshard_record":1', b'"kvshard_record":99'), *lines[1:]],
            WrongFormat,
            "format 99",
        ),
        (
            lambda lines: [lines[0].replace(b'"seed":7', b'"seed":"x"'), *lines[1:]],
            MalformedLine,
            ":1: Expected `int`, got `str`",
        ),
        (lambda lines: lines[:-1], MissingFooter, ":3: the last line is no footer"),
        (lambda lines: lines[:1], MissingFooter, ":1: the last line is no footer"),
        (lambda lines: [*lines[:-1], lines[-1][:10]], MissingFooter, "run it again"),
        (lambda lines: [*lines[:2], b"{", *lines[2:]], MalformedLine, ":3: "),
        (
            lambda lines: [*lines[:2], lines[1].replace(b"pass", b"passed"), *lines[2:]],
            MalformedLine,
            "Invalid enum value",
        ),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], DuplicateCase, ":3: 'a.one' has a result on line 2 already"),
        (lambda lines: [lines[0], *lines[2:]], WrongFooter, "the footer counts"),
    ],
)
def test_a_broken_record_is_a_named_error(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], error: type[RecordError], part: str
) -> None:
    """Wrong format, malformed line, duplicate case, missing or wrong footer: each says where and what."""
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"\n".join(change(lines_of(tmp_path))) + b"\n")

    with pytest.raises(error) as caught:
        read(path)

    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_a_missing_record_is_told(tmp_path: Path) -> None:
    """A file that is not there is a named error with what was expected."""
    with pytest.raises(
        RecordError, match="No such file or directory; expected a file written by `kvshard run --record`"
    ):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([Verdict.PASS], 0),
        ([Verdict.PASS, Verdict.SKIP], 0),
        ([Verdict.PASS, Verdict.UNKNOWN], 2),
        ([Verdict.SKIP], 2),
        ([], 2),
        ([Verdict.PASS, Verdict.UNKNOWN, Verdict.ERROR], 3),
        ([Verdict.ERROR, Verdict.FAIL, Verdict.UNKNOWN], 1),
    ],
)
def test_exit_codes(verdicts: list[Verdict], code: int) -> None:
    """A counterexample outweighs an error, an error what is unknown; nothing at all is not a pass."""
    assert exit_code(CaseResult(case=str(number), verdict=verdict) for number, verdict in enumerate(verdicts)) == code


def test_the_five_parts_of_a_failure() -> None:
    """Claim, seen, expected with the reason, the ops and the command, in this order."""
    assert message(FAILURE).splitlines() == [
        "claim     A claim.",
        "seen      3",
        "expected  2",
        "          because so",
        "ops       2 on N=2",
        "          1. open a",
        "          2. finish a",
        "replay    kvshard replay x",
    ]


def test_the_seed_is_the_commit_in_ci() -> None:
    """In CI a commit always gives the same seed; elsewhere, and without a commit, it is random."""
    assert provenance.default_seed("0000002a" + "0" * 32, in_ci=True) == (42, "from commit 0000002a0000")
    assert {provenance.default_seed("f" * 40, in_ci=False)[1], provenance.default_seed(None, in_ci=True)[1]} == {
        "random"
    }


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    """Outside of a git checkout there is no commit; versions are told without an import."""
    assert provenance.commit(tmp_path) is None
    assert set(provenance.versions()) == {"python", "torch", "hypothesis", "pytest", "pytest-xdist"}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", provenance.kvshard_version())


def test_every_environment_variable_that_is_read_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source reads no variable that a record would leave out, and unknown KVSHARD_* ones are shown as typos."""
    read_names = set()
    for folder in ("harness", "kvshard_ref", "suites"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            read_names |= set(re.findall(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["'](\w+)["']""", text))
            read_names |= set(re.findall(r"""["'](\w+)["'] (?:not )?in os\.environ""", text))
    monkeypatch.setenv("KVSHARD_SEDE", "1")

    assert {"CI", "COLUMNS"} <= read_names
    assert read_names - set(provenance.ENVIRONMENT) == set()
    assert provenance.environment()["KVSHARD_SEDE"] == "1"


def test_a_record_names_the_engine_and_not_the_way_to_it(tmp_path: Path) -> None:
    """The header has no field for an address."""
    write(tmp_path / "run.jsonl", sample())

    header = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    assert "address" not in header
    assert set(header) == {field.encode_name for field in msgspec.structs.fields(Header)}

"""Per-item answers of an evaluation, read from the files of several clients, told apart by their content.

    kvshard   one JSON object a line: item, repeat, correct, answer, finish_reason, error, tokens
    lm-eval   samples_<task>_<time>.jsonl of --log_samples: doc_hash, filter, a metric of 0 or 1
    sgl-eval  output-rs<repeat>.jsonl: problem, expected_answer, symbolic_correct, finish_reason

An item is known by a hash of its document, so two runs are paired by what was asked and not by a position. A document
that a file holds twice is two items, in the order of their ids.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.record import write_lines
from harness.usage import UserError, nearest

METRICS = ("exact_match", "acc", "pass@1")  # of lm-eval, the first that a line has
KINDS = (
    "a line of kvshard (item, correct), of lm-eval's --log_samples (doc_hash, filter, a metric) or of sgl-eval "
    "(problem, expected_answer, symbolic_correct)"
)


class SamplesError(UserError):
    """A file of samples cannot be used; the message names file, line, what was expected and the next step."""


class State(enum.StrEnum):
    """Whether a sample can be judged."""

    ANSWERED = "answered"
    ERROR = "error"  # the request failed
    TRUNCATED = "truncated"  # the answer was cut off at the limit of tokens


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One answer to one item; `correct` says nothing unless the state is ANSWERED."""

    item: str
    repeat: int = 0
    correct: bool
    answer: str = ""
    finish_reason: str | None = None  # None: the client does not record it
    error: str | None = None
    tokens: int | None = None
    accept_length: float | None = None  # tokens that a pass of the engine gives with its draft; None: not told
    about: str = ""  # where the item comes from, in a task's own words

    @property
    def state(self) -> State:
        """Errors and truncated answers are told apart from wrong ones."""
        if self.error is not None or self.finish_reason == "error":
            return State.ERROR
        return State.TRUNCATED if self.finish_reason == "length" else State.ANSWERED


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of a run, by item and repeat."""

    name: str
    client: str
    filter: str | None = None
    answers: dict[str, dict[int, Sample]]

    @property
    def all(self) -> list[Sample]:
        """Every sample."""
        return [sample for repeats in self.answers.values() for sample in repeats.values()]

    def count(self, state: State) -> int:
        """Samples in this state."""
        return sum(sample.state is state for sample in self.all)


def item_key(document: Any) -> str:
    """The key of an item: a hash of its document, whatever the order of its fields."""
    text = json.dumps(document, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, samples: Sequence[Sample]) -> None:
    """Writes samples in the form of kvshard. Raises `UserError`."""
    write_lines(path, samples)


def read(path: Path, chosen_filter: str | None = None) -> Samples:
    """Reads a file, or a folder that holds one run. Raises `SamplesError`."""
    parts = [(file, list(_lines(file))) for file in _files(path)]
    rows = [row for _, lines in parts for _, row in lines]
    if not rows:
        raise SamplesError(f"{path}: holds no samples; expected {KINDS}")
    client = _client(path, rows[0])
    if client != "lm-eval" and chosen_filter is not None:
        raise SamplesError(
            f"{path}: --filter {chosen_filter!r} is for files of lm-eval, this is of {client}; leave it out"
        )
    if client == "lm-eval":
        chosen_filter = _filter(path, rows, chosen_filter)
    answers: dict[str, dict[int, Sample]] = {}
    for file, lines in parts:
        for number, sample in _samples(file, lines, client, chosen_filter):
            repeats = answers.setdefault(sample.item, {})
            if sample.repeat in repeats:
                raise SamplesError(
                    f"{file}:{number}: item {sample.item} has repeat {sample.repeat} already; expected each once: "
                    "were two runs written into one file?"
                )
            repeats[sample.repeat] = sample
    return Samples(name=path.name, client=client, filter=chosen_filter, answers=answers)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    repeats = {
        file: int(found[1]) for file in path.iterdir() if (found := re.fullmatch(r"output-rs(\d+)\.jsonl", file.name))
    }
    if repeats:
        return sorted(repeats, key=lambda file: repeats[file])
    files = sorted(path.rglob("samples_*.jsonl")) or sorted(path.glob("*.jsonl"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:4]) or "none"
        raise SamplesError(
            f"{path}: a folder with {len(files)} files of samples ({names}); expected one: name the file"
        )
    return files


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SamplesError(f"{path}: cannot be read: {error.strerror or error}; expected a file of samples") from error
    except UnicodeDecodeError as error:
        raise SamplesError(f"{path}: is no UTF-8 text ({error.reason}); expected {KINDS}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SamplesError(
                f"{path}:{number}: is no JSON ({error}); expected one object a line: was the run cut off? Run it again"
            ) from error
        if not isinstance(row, dict):
            raise SamplesError(f"{path}:{number}: is a {type(row).__name__}; expected {KINDS}")
        yield number, row


def _client(path: Path, row: dict[str, Any]) -> str:
    if "doc_hash" in row:
        return "lm-eval"
    if "expected_answer" in row:
        return "sgl-eval"
    if "item" in row:
        return "kvshard"
    raise SamplesError(f"{path}: a line has the fields {', '.join(sorted(row)) or 'none'}; expected {KINDS}")


def _filter(path: Path, rows: Sequence[dict[str, Any]], chosen: str | None) -> str:
    """The filter to take: of lm-eval, which scores each answer in several ways."""
    names = sorted({str(row.get("filter", "none")) for row in rows})
    if chosen is None and len(names) > 1:
        raise SamplesError(f"{path}: scored by the filters {', '.join(names)}; choose one with --filter")
    if chosen is not None and chosen not in names:
        raise SamplesError(f"{path}: no filter {chosen!r}{nearest(chosen, names)} There is: {', '.join(names)}")
    return names[0] if chosen is None else chosen


def _samples(
    file: Path, lines: Sequence[tuple[int, dict[str, Any]]], client: str, chosen: str | None
) -> Iterator[tuple[int, Sample]]:
    """The samples of one file with their line numbers."""
    if client == "lm-eval":
        lines = [each for each in lines if str(each[1].get("filter", "none")) == chosen]
    if client == "kvshard":
        for number, row in lines:
            try:
                yield number, msgspec.convert(row, Sample)
            except msgspec.ValidationError as error:
                raise SamplesError(
                    f"{file}:{number}: {error}; expected a sample of kvshard: see docs/gates.md"
                ) from error
        return
    name = "doc_id" if client == "lm-eval" else "id"
    seen: Counter[str] = Counter()
    ids: set[str] = set()
    for number, row in sorted(lines, key=lambda each: _order(each[1].get(name))):
        place = str(row.get(name, number))
        if place in ids:
            raise SamplesError(
                f"{file}:{number}: {name} {place} is there twice; expected each once: are two runs in one file?"
            )
        ids.add(place)
        try:
            sample = _lm_eval(row) if client == "lm-eval" else _sgl_eval(row, file)
        except (KeyError, TypeError, ValueError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise SamplesError(f"{file}:{number}: {what}; expected {KINDS}") from error
        seen[sample.item] += 1
        if seen[sample.item] > 1:
            sample = msgspec.structs.replace(sample, item=f"{sample.item}#{seen[sample.item]}")
        yield number, sample


def _order(place: Any) -> tuple[int, int, str]:
    text = str(place)
    return (0, int(text), "") if text.isdecimal() else (1, 0, text)


def _lm_eval(row: dict[str, Any]) -> Sample:
    metric = next((name for name in METRICS if name in row), None)
    if metric is None:
        raise ValueError(f"none of the metrics {', '.join(METRICS)}")
    answer, response = _first(row.get("filtered_resps", "")), _first(row.get("resps", "-"))
    return Sample(
        item=str(row["doc_hash"])[:16],
        correct=_truth(row[metric], metric),
        answer=answer if isinstance(answer, str) else json.dumps(answer),
        # a client that gives up on a request writes an empty response, which its scorer takes for a wrong answer
        error="empty response" if response == "" else None,
    )


def _first(nested: Any) -> Any:
    """The first of a list of lists."""
    while isinstance(nested, list) and nested:
        nested = nested[0]
    return nested


def _sgl_eval(row: dict[str, Any], file: Path) -> Sample:
    repeat = re.search(r"output-rs(\d+)", file.name)
    document = [row.get("problem") or row.get("id"), row["expected_answer"]]
    tokens, finish = row.get("num_generated_tokens"), row.get("finish_reason")
    answer, written = row.get("predicted_answer"), row.get("generation", "-") or row.get("reasoning_content")
    return Sample(
        item=item_key(document),
        repeat=int(repeat[1]) if repeat else 0,
        correct=_truth(row["symbolic_correct"], "symbolic_correct"),
        answer="" if answer is None else str(answer),
        finish_reason=None if finish is None else str(finish),
        # as of lm-eval: nothing at all is what a request comes to that was lost
        error=None if written or finish in {"error", "length"} else "empty response",
        tokens=tokens if isinstance(tokens, int) else None,
    )


def _truth(value: Any, name: str) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{name} is {value!r}, expected 0 or 1")
    return bool(value)

"""A run's sample file while it grows: a line for each answer, on the disk before the next one is counted.

    SAMPLES.jsonl       samples in kvshard's form, as `gate compare` reads them
    SAMPLES.jsonl.run   what the run is of; another run may not go on with the file
    SAMPLES.jsonl.texts whole answers, to look into

A sample's line is what counts: a text without one is asked again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from harness.record import write_lines, write_text
from harness.samples import Sample, State
from harness.usage import UserError

FORMAT = 1
SHOWN_MAX = 80
Answered = dict[tuple[str, int], Sample]


class RunOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run is of: where one of these differs, answers do not belong into one file."""

    kvshard_run: int = FORMAT
    engine: str  # its address
    model: str
    dialect: str
    task: str
    definition: str
    filter: str
    shots: int
    data: str
    prompts: str  # hash of all of them
    items: int
    repeats: int
    generation: dict[str, Any]
    lm_eval: str  # version


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    item: str
    repeat: int
    text: str


class Journal:
    """The files of a run, open for more. Only one process may hold them."""

    def __init__(self, path: Path, run: RunOf, *, has_moved: bool = False) -> None:
        """Reads what is there. Raises `UserError` when it is of another run, or is written right now."""
        self.path, self.run = path, run
        self.answered: Answered = {}
        self.dropped = 0  # failed requests of before, which are asked again
        self._has_moved = has_moved
        self._head, self._texts_path = _beside(path, ".run"), _beside(path, ".texts")
        self._file: BinaryIO | None = None
        self._texts: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._texts = self._texts_path.open("ab")
            fcntl.flock(self._texts, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_over()
            self._file = self.path.open("ab")
        except BlockingIOError as error:
            self.close()
            raise UserError(f"{self.path}: another run is writing it; wait for it, or choose another --out") from error
        except OSError as error:
            self.close()
            raise UserError(
                f"{self.path}: cannot be written: {error.strerror or error}; choose another --out"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, sample: Sample, text: str) -> None:
        """Keeps an answer, or a failed request."""
        if self._file is None or self._texts is None:
            raise RuntimeError(f"{self.path}: is not open")
        if text:
            _append(self._texts, Text(item=sample.item, repeat=sample.repeat, text=text))
        _append(self._file, sample)
        self.answered[sample.item, sample.repeat] = sample

    def close(self) -> None:
        """Lets go of the files."""
        for file in (self._file, self._texts):
            if file is not None:
                file.close()

    def _take_over(self) -> None:
        """Checks what is there, and leaves the answers of before alone in the file."""
        there = _samples(self.path) if self.path.exists() else []
        if not self._head.exists():
            if there:
                raise UserError(
                    f"{self.path}: holds {len(there):,} samples, and no {self._head.name} says of what run; choose "
                    "another --out"
                )
        else:
            self._compare()
        write_text(self._head, msgspec.json.format(msgspec.json.encode(self.run), indent=2).decode() + "\n")
        for sample in there:
            if sample.state is State.ERROR:
                self.dropped += 1
            else:
                self.answered[sample.item, sample.repeat] = sample
        write_lines(self.path, list(self.answered.values()))

    def _compare(self) -> None:
        """Raises `UserError` that says in what the run of before differs."""
        try:
            before = msgspec.json.decode(self._head.read_bytes(), type=RunOf)
        except msgspec.MsgspecError as error:
            raise UserError(
                f"{self._head}: {error}; expected what `kvshard gate run` wrote; choose another --out"
            ) from error
        skipped = {"engine"} if self._has_moved else set()
        old, new = msgspec.structs.asdict(before), msgspec.structs.asdict(self.run)
        differs = [name for name in new if old[name] != new[name] and name not in skipped]
        if not differs:
            return
        told = "; ".join(f"{name}: {_shown(old[name])} there, {_shown(new[name])} now" for name in differs)
        step = "choose another --out"
        if differs == ["engine"]:
            step += ", or say --moved if it is the same server at another address"
        raise UserError(f"{self.path}: is of another run: {told}; {step}")


def _beside(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def _append(file: BinaryIO, line: msgspec.Struct) -> None:
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _samples(path: Path) -> Sequence[Sample]:
    """The samples of a file, whose last line may be torn. Raises `UserError`."""
    samples = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            samples.append(msgspec.json.decode(line, type=Sample))
        except msgspec.MsgspecError as error:
            if number == len(lines):  # no line break behind it: the writer was killed
                break
            raise UserError(f"{path}:{number}: {error}; expected a sample of kvshard; choose another --out") from error
    return samples


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}.."

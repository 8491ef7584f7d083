"""Mistakes that a user can put right: told on one line, never as a traceback."""

from __future__ import annotations

import difflib
import tomllib
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Wrong usage or unusable input. The message shows the value, what was expected and what to do; exit code 3."""


def toml_of(path: Path, expected: str) -> dict[str, Any]:
    """What a TOML file holds; `expected` says what it should be. Raises `UserError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {expected}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no TOML: {error}; {expected}") from error


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of a sentence: `; did you mean 'x'?` for the closest of `words`, or a full stop when none is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def told(exception: BaseException, skip: str = "") -> str:
    """An exception on one line with the place that raised it; a place inside the file `skip` says nothing."""
    frames = [place for place in traceback.extract_tb(exception.__traceback__) if not place.filename.startswith("<")]
    text = " ".join(f"{type(exception).__name__}: {exception}".split())
    if isinstance(exception, SyntaxError):
        return text  # names its own file and line
    if not frames or frames[-1].filename == skip or "importlib" in frames[-1].filename:
        return text
    return f"{text} at {frames[-1].filename}:{frames[-1].lineno}"

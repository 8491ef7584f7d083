"""Values of the command line, checked, and what a command with a long run shows and writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from harness.capacity import CapacityError

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def whole(text: str, option: str, least: int = 1) -> int:
    """A whole number of at least `least`. Raises CapacityError."""
    if not re.fullmatch(r"\d{1,18}", text.strip()) or (value := int(text)) < least:
        raise CapacityError(f"{option} {text!r}: expected a whole number of at least {least}")
    return value


def size(text: str, option: str) -> int:
    """Bytes, from a text such as 8GiB. Raises CapacityError."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT]iB|)", text.strip(), re.IGNORECASE | re.ASCII)
    value = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if value < 1:
        raise CapacityError(f"{option} {text!r}: expected a size such as 8GiB, 512MiB or 1.5TiB")
    return value


def target(text: str | None, option: str, suffix: str = "") -> Path | None:
    """Where a result goes; looked at before the work begins. Raises CapacityError."""
    if text is None:
        return None
    path = Path(text)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise CapacityError(f"{option} {text!r}: expected a regular file in a folder that exists")
    if suffix and path.suffix.lower() != suffix:
        raise CapacityError(f"{option} {text!r}: expected a file name that ends with {suffix}")
    return path.resolve()  # a link stays a link: the file it leads to is replaced


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; none when stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        bar = shown.add_task(what, total=total)
        yield lambda count: shown.advance(bar, count)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place once it is whole; gone when writing it fails."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise CapacityError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)

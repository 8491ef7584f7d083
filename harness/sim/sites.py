"""Call sites of the program under test, as texts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Sites:
    """Finds the nearest frame outside of torch and of the simulation; keeps its texts, as there are few."""

    def __init__(self) -> None:
        self._here = Path.cwd()
        self._ours: dict[str, bool] = {}
        self._texts: dict[tuple[str, int, str], str] = {}

    def skip(self, file: str) -> None:
        """Take a file for a part of the simulation: what it calls is called by its caller."""
        self._ours[file] = True

    def here(self) -> str:
        """The call site of the program, "path/relative/to/cwd.py:line in function"."""
        file, line, function = self.place()
        text = self._texts.get((file, line, function))
        if text is None:
            path = Path(file)
            short = path.relative_to(self._here) if path.is_relative_to(self._here) else path
            text = self._texts[file, line, function] = f"{short}:{line} in {function}"
        return text

    def place(self) -> tuple[str, int, str]:
        """File, line and qualified function of the call site."""
        frame = sys._getframe(1)  # noqa: SLF001 - inspect.currentframe is the same, and takes one more call
        ours = self._ours
        while True:
            code = frame.f_code
            file = code.co_filename
            skip = ours.get(file)
            if skip is None:
                skip = ours[file] = file.startswith(OUTSIDE)
            if not skip or frame.f_back is None:
                return file, frame.f_lineno, code.co_qualname
            frame = frame.f_back

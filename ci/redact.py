"""Takes secrets out of what leaves the machine: values of variables with such names, tokens, passwords in URLs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|API_?KEY|(ACCESS|PRIVATE)_?KEY|_KEY$", re.IGNORECASE)
LENGTH_MIN = 6  # a shorter value, such as 1, stands everywhere
_STARS = b"***"
_TOKEN = re.compile(rb"\b(?:gh[a-z]_|github_pat_|hf_|sk-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{12,}")
_IN_URL = re.compile(rb"(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)")


class Redactor:
    """Replaces the secrets of an environment in any data."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        plain = {value for name, value in environment.items() if SECRET_NAME.search(name)}
        values = {form for value in plain if len(value) >= LENGTH_MIN for form in (value, json.dumps(value)[1:-1])}
        # the longest first: one may hold another
        self._values = [value.encode(errors="surrogateescape") for value in sorted(values, key=len, reverse=True)]

    def data(self, data: bytes) -> bytes:
        """The same without secrets."""
        for value in self._values:
            data = data.replace(value, _STARS)
        return _IN_URL.sub(_STARS, _TOKEN.sub(_STARS, data))

    def text(self, text: str) -> str:
        """The same without secrets."""
        return self.data(text.encode(errors="surrogateescape")).decode(errors="replace")

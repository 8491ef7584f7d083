"""A test file without its middle: what is before and around registrations, and its `__main__` guard.

To parse thousands of whole files takes a minute, and CI needs little of each. What is left out are whole statements
between the last mention of a marker and the guard; line numbers stay. Whatever is in doubt is given as it is, and what
cannot be parsed without its middle has to be parsed with it.
"""

from __future__ import annotations

import re

MARKER = re.compile(rb"register_[a-z0-9]+_ci")
_STATEMENT = re.compile(rb"\n(?=[^\s#)\]}])")  # its end: the next line begins at the left, unless within a string
_GUARD = re.compile(rb"^if[ \t]+[^\n]*__main__", re.MULTILINE)
_STRING = re.compile(
    rb"#[^\n]*"
    rb'|"""(?:[^\\"]|\\.|"(?!""))*"""'
    rb"|'''(?:[^\\']|\\.|'(?!''))*'''"
    rb'|"(?:[^"\\\n]|\\.)*"'
    rb"|'(?:[^'\\\n]|\\.)*'",
    re.DOTALL,
)


def skimmed(content: bytes) -> bytes:
    """The content that is to be parsed first; all of it, or less."""
    marks = [found.end() for found in MARKER.finditer(content)]
    end = _STATEMENT.search(content, marks[-1]) if marks else None
    if end is None:
        return content
    head, rest = content[: end.end()], content[end.end() :]
    if b"__main__" not in rest:
        return head
    guard = _GUARD.search(rest)
    if guard is None:  # one in several lines, or none
        return content
    middle, tail = rest[: guard.start()], rest[guard.start() :]
    if b"__main__" in middle or middle.endswith(b"\\\n") or re.search(rb"[\"']", _STRING.sub(b"", middle)):
        return content  # the guard may be within a string
    return head + b"\n" * middle.count(b"\n") + tail

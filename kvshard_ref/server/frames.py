"""Frames between the face and a rank: 4 bytes of length, then JSON."""

from __future__ import annotations

import json
from io import RawIOBase
from typing import Any

HEAD_BYTES = 4
Message = dict[str, Any]


def framed(message: Message) -> bytes:
    """One frame."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def read_frame(pipe: RawIOBase) -> Message | None:
    """The next message; None at the end of the pipe, which is unbuffered: a buffer's lock outlives its thread."""
    head = _read(pipe, HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    message: Message = json.loads(_read(pipe, int.from_bytes(head, "little")))
    return message


def _read(pipe: RawIOBase, count: int) -> bytes:
    """So many bytes, fewer at the end of the pipe."""
    parts = bytearray()
    while len(parts) < count:
        part = pipe.read(count - len(parts))
        if not part:
            break
        parts += part
    return bytes(parts)

"""Importing this imports sglang: for a process that others are forked from, each of which would take its time anew."""

from __future__ import annotations

from contextlib import suppress

from harness.adapters.sglang_install import parts
from harness.usage import UserError

with suppress(UserError):  # said by the engine, once it is asked for
    parts()

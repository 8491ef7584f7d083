"""The cases that the tests of hunts use: two that see something, one that needs a promise."""

from __future__ import annotations

from harness.types import AnyOp, AnyReply
from harness.views import Snapshot
from tests.sample_cases import SERVES, sample, test_free_pages_are_counted, test_reads_what_was_written

__all__ = ["test_free_pages_are_counted", "test_misuse", "test_reads_what_was_written"]


@sample("sample.misuse", needs=(*SERVES, "promise.refuses_misuse"), seen={"opened": 1})
def test_misuse(op: AnyOp, reply: AnyReply, after: Snapshot | None) -> None:
    """Anything goes for an engine that refuses misuse.

    A case that looks at nothing.
    """

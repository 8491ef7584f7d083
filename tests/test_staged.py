"""Rows of a GPU sent and received through a copy in the CPU's memory; here the regions are the CPU's, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ci.register import register_cpu_ci
from harness.transports.memory import MemoryEnd, Network
from harness.transports.staged import Staged
from kvshard_ref.transport import DONE, FAILED, Block

register_cpu_ci(est_time=3, stage="commit")

PAGES = 20


def content(seed: int) -> torch.Tensor:
    bits = torch.randint(-(2**15), 2**15, (PAGES, 6), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int16).view(torch.bfloat16)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def joined(
    source: Callable[[MemoryEnd], MemoryEnd | Staged], target: Callable[[MemoryEnd], MemoryEnd | Staged]
) -> tuple[MemoryEnd | Staged, MemoryEnd | Staged, torch.Tensor, torch.Tensor]:
    """P and D, connected, and their regions kv.0."""
    network = Network()
    prefill, decode = source(network.end("P")), target(network.end("D"))
    rows, received = content(1), content(2)
    prefill.register({"kv.0": rows})
    decode.register({"kv.0": received})
    prefill.connect("D")
    return prefill, decode, rows, received


def plain(end: MemoryEnd) -> MemoryEnd:
    return end


def test_sends_what_the_region_holds_now() -> None:
    """A write brings the rows of the region at that moment, and only the pages of the block."""
    prefill, _, rows, received = joined(Staged, plain)
    expected = received.clone()
    rows[3:5] = expected[10:12] = content(3)[3:5]
    assert DONE == prefill.write("D", [Block("kv.0", 3, 10, 2)]).poll()
    assert same(expected, received)
    assert FAILED == prefill.write("D", [Block("kv.9", 0, 0, 1)]).poll()


@pytest.mark.parametrize("source", [plain, Staged])
def test_what_a_peer_wrote_arrives_when_it_has_landed(source: Callable[[MemoryEnd], MemoryEnd | Staged]) -> None:
    """Until `landed` the region is as it was; then the pages named are the peer's, and no other has changed."""
    prefill, decode, rows, received = joined(source, Staged)
    before = received.clone()
    assert DONE == prefill.write("D", [Block("kv.0", 3, 10, 2), Block("kv.0", 8, 0, 1)]).poll()
    assert same(before, received)
    expected = before.clone()
    expected[[11, 0]] = rows[[4, 8]]
    decode.landed([11, 0])
    assert same(expected, received)


def test_own_rows_on_a_page_stay_until_it_lands_again() -> None:
    """What this end writes on a page that has landed stays, whatever lands on others."""
    prefill, decode, rows, received = joined(plain, Staged)
    prefill.write("D", [Block("kv.0", 0, 0, 2)])
    decode.landed([0])
    received[0] = content(5)[0]
    decode.landed([1])
    assert same(content(5)[:1], received[:1])
    assert same(rows[1:2], received[1:2])


def test_messages_pass_through() -> None:
    """Messages arrive both ways, and a peer that is gone is lost."""
    prefill, decode, _, _ = joined(Staged, Staged)
    prefill.notify("D", b"done")
    assert [("P", b"done")] == decode.messages()
    decode.notify("P", b"ack")
    assert [("D", b"ack")] == prefill.messages()
    decode.close()
    assert {"D"} == prefill.lost()

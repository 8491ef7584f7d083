"""Writes within one process, device to device: by runs and through staging."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.transports import peer_copy
from harness.transports.memory import MemoryEnd, Network
from harness.transports.peer_copy import PeerCopyNetwork
from kvshard_ref.transport import DONE, FAILED, Block

register_cpu_ci(est_time=15, stage="commit")

PAGES = 40
WIDTHS = {"kv.0": 6, "kv.1": 6, "index.0": 4}  # bfloat16 elements: pages of 12 bytes, and of 8, an int64


def content(name: str, seed: int) -> torch.Tensor:
    bits = torch.randint(-(2**15), 2**15, (PAGES, WIDTHS[name]), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int16).view(torch.bfloat16)


def joined(network: Network) -> tuple[MemoryEnd, MemoryEnd]:
    """P and D with other rows, connected."""
    ends = network.end("P"), network.end("D")
    for side, end in enumerate(ends):
        end.register({name: content(name, 2 * at + side) for at, name in enumerate(WIDTHS)})
    ends[0].connect("D")
    return ends


@st.composite
def writes(draw: st.DrawFn) -> list[list[Block]]:
    """Some writes, each of blocks that share no page of the target."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        blocks = []
        for name in draw(st.lists(st.sampled_from(sorted(WIDTHS)), unique=True, min_size=1)):
            cuts = sorted(draw(st.sets(st.integers(0, PAGES), min_size=2, max_size=8)))
            for start, end in draw(st.permutations(list(itertools.pairwise(cuts)))):
                source = draw(st.integers(0, PAGES - (end - start)))
                blocks.append(Block(name, source, start, end - start))
        found.append(blocks)
    return found


@pytest.mark.parametrize("run_bytes", [0, 24, 1 << 30], ids=["by runs", "mixed", "through staging"])
@given(writes=writes())
def test_pages_arrive(run_bytes: int, writes: list[list[Block]]) -> None:
    """Whatever the runs, the target holds the source's pages where they were written and nothing else is touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_copy, "RUN_BYTES_MIN", run_bytes)
        patch.setattr(peer_copy, "PIECE_BYTES", 50)  # four pages of 12 bytes, six of 8
        prefill, decode = joined(PeerCopyNetwork())
        expected = {name: pages.clone() for name, pages in decode.regions.items()}
        for blocks in writes:
            assert DONE == prefill.write("D", blocks).poll()
            for name, src, dst, count in blocks:
                expected[name][dst : dst + count] = prefill.regions[name][src : src + count]
    for name, pages in expected.items():
        assert torch.equal(pages.view(torch.int16), decode.regions[name].view(torch.int16)), name


BAD = {
    "nothing": [],
    "unknown": [Block("kv.9", 0, 0, 1)],
    "source": [Block("kv.0", PAGES - 1, 0, 2)],
    "target": [Block("kv.0", 0, PAGES - 1, 2)],
    "below": [Block("kv.0", -1, 0, 1)],
    "empty": [Block("kv.0", 0, 0, 0)],
    "second region": [Block("kv.0", 0, 0, 1), Block("kv.1", 0, PAGES, 1)],
}


@pytest.mark.parametrize("blocks", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_fails(blocks: list[Block]) -> None:
    """A block outside of a region fails the ticket."""
    prefill, _ = joined(PeerCopyNetwork())
    assert FAILED == prefill.write("D", blocks).poll()


def test_unequal_pages_and_lost_peers_fail() -> None:
    """Pages of two sizes fail, and so does a write to an end that has left."""
    prefill, decode = joined(PeerCopyNetwork())
    decode.regions["kv.1"] = decode.regions["kv.1"][:, :4].contiguous()
    assert FAILED == prefill.write("D", [Block("kv.1", 0, 0, 1)]).poll()
    decode.close()
    assert FAILED == prefill.write("D", [Block("kv.0", 0, 0, 1)]).poll()

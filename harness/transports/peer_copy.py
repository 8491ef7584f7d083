"""PeerCopyNetwork: ends of one process, each with its rows on a device of its own; a write copies device to device.

For two GPUs that one process sees, and for CPU tensors. Messages go as in Network; a ticket is done with its last copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from harness.transports.memory import MemoryEnd, MemoryTicket, Network
from kvshard_ref.device import device_module_of
from kvshard_ref.transport import FAILED, Block

Spans = npt.NDArray[np.int64]
RUN_BYTES_MIN = 16 << 20
"""Runs of consecutive pages of this mean size are copied one by one, shorter ones through staging."""
PIECE_BYTES = 96 << 20
DEPTH = 2
"""Pieces in staging: while one crosses, the last one is spread and the next one collected."""


class Move(NamedTuple):
    """What is written of one region."""

    source: torch.Tensor
    target: torch.Tensor
    spans: Spans
    """Rows source page, target page, count, a column for each run of pages; the same object when it is the same."""


class PageCopier:
    """Copies pages from one device to another, in the order of the calls.

        collect stream (source)   pages --> staging     piece 0   piece 1   piece 2
        copy stream               staging --> staging             piece 0   piece 1   piece 2
        spread stream (target)    staging --> pages                         piece 0   piece 1   piece 2

    To issue a copy between devices takes the host some 25 microseconds, in which the link moves 9 MB.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.source = source
        self.target = target
        self._modules = device_module_of(source), device_module_of(target)
        self._collect = _stream(source)
        self._spread = _stream(target)
        self._copy_out = _stream(source)
        self._copy_in = self._copy_out if source == target else _stream(target)
        self._staging: tuple[torch.Tensor, torch.Tensor] | None = None
        self._collected, self._copied, self._done = (
            [self._modules[index].Event() for _ in range(DEPTH)] for index in (0, 0, 1)
        )
        self._pieces = 0
        self._index: tuple[Spans, torch.Tensor, torch.Tensor] | None = None
        if source != target:
            self._open_both_ways()

    def copy(self, move: Move) -> Any:
        """Issue the copies; returns the event behind them and all before. Nothing here waits for a device."""
        counts = move.spans[2]
        if _bytes(move.source) * counts.sum() >= RUN_BYTES_MIN * len(counts):
            with self._on(self._copy_out, self._copy_in):
                for src, dst, count in move.spans.T.tolist():
                    move.target[dst : dst + count].copy_(move.source[src : src + count], non_blocking=True)
            self._spread.wait_stream(self._copy_out)
        else:
            self._through_staging(move)
        done = self._modules[1].Event()
        done.record(self._spread)
        return done

    def _through_staging(self, move: Move) -> None:
        source, target = _wide(move.source), _wide(move.target)
        src_pages, dst_pages = self._pages(move.spans)
        limit = max(1, PIECE_BYTES // _bytes(source))
        out, into = (buffer.view(source.dtype) for buffer in self._buffers(limit * _bytes(source)))
        step = -(-len(src_pages) // -(-len(src_pages) // limit))  # pieces of one size
        for start in range(0, len(src_pages), step):
            slot = self._pieces % DEPTH
            self._pieces += 1
            src, dst = src_pages[start : start + step], dst_pages[start : start + step]
            leaving, arriving = (buffer[slot][: len(src) * source.shape[1]] for buffer in (out, into))
            with self._on(self._collect):
                self._collect.wait_event(self._copied[slot])  # the slot's last piece has left
                torch.index_select(source, 0, src, out=leaving.view(len(src), -1))
                self._collected[slot].record(self._collect)
            with self._on(self._copy_out, self._copy_in):
                self._copy_out.wait_event(self._collected[slot])
                self._copy_out.wait_event(self._done[slot])  # and was spread
                arriving.copy_(leaving, non_blocking=True)
                self._copied[slot].record(self._copy_out)
            with self._on(self._spread):
                self._spread.wait_event(self._copied[slot])
                target.index_copy_(0, dst, arriving.view(len(src), -1))
                self._done[slot].record(self._spread)

    def _pages(self, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """Page indices on the two devices; all layers of a component have the same, so those used last are kept."""
        if self._index is None or self._index[0] is not spans:
            starts = np.cumsum(spans[2]) - spans[2]
            offsets = np.arange(spans[2].sum()) - np.repeat(starts, spans[2])
            src, dst = (torch.from_numpy(np.repeat(side, spans[2]) + offsets) for side in spans[:2])
            with self._on(self._collect):
                src = _sent(src, self.source)
            with self._on(self._spread):
                self._index = (spans, src, _sent(dst, self.target))
        return self._index[1:]

    def _buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Staging uint8 [DEPTH, size] on either device."""
        if self._staging is None or self._staging[0].shape[1] != size:
            for module in self._modules:  # seldom: pages of another size
                module.synchronize()
            out, into = (
                torch.empty(DEPTH, size, dtype=torch.uint8, device=device) for device in (self.source, self.target)
            )
            self._staging = (out, into)
        return self._staging

    def _on(self, *streams: Any) -> AbstractContextManager[Any]:
        """Work on each stream's device goes to that stream."""
        stack = ExitStack()
        for stream in streams:
            stack.enter_context(self._modules[0].stream(stream))
        return stack

    def _open_both_ways(self) -> None:
        """A copy uses the direct link only once each device may reach the other: torch opens a way at its first use."""
        one, other = torch.zeros(1, device=self.source), torch.zeros(1, device=self.target)
        other.copy_(one)
        one.copy_(other)


class PeerCopyNetwork(Network):
    """Writes begin at once and leave from the regions as they are then; the end of a write is an event."""

    def __init__(self) -> None:
        super().__init__()
        self._copiers: dict[tuple[torch.device, torch.device], PageCopier] = {}
        self._newest: tuple[list[Any], Spans] = ([], np.zeros((3, 0), np.int64))

    def begin(self, writer: MemoryEnd, peer: MemoryEnd, blocks: Sequence[Block]) -> MemoryTicket:
        """Issue the copies of a write, region by region, so that the first ones run while the next are looked at."""
        self.settle()
        ticket = MemoryTicket(writer, peer, [], [], self.tick)
        fits = bool(blocks) and not (writer.gone or peer.gone)
        for region, run in groupby(blocks, itemgetter(0)):
            move = self._move(writer.regions.get(region), peer.regions.get(region), run) if fits else None
            if move is None:
                fits = False
                break
            ticket.event = self._copier(move).copy(move)
        if fits:
            self._writes.append(ticket)
        else:
            ticket.outcome = FAILED
            if ticket.event is not None:
                ticket.event.synchronize()  # after its end nothing more is written
        return ticket

    def _move(self, source: torch.Tensor | None, target: torch.Tensor | None, run: Iterable[Block]) -> Move | None:
        """The blocks of one region; None when one leaves it, or the two sides' pages differ."""
        if source is None or target is None or _bytes(source) != _bytes(target):
            return None
        _, *columns = zip(*run, strict=True)
        if columns != self._newest[0]:  # layers repeat their spans, thousands of them
            self._newest = (columns, np.array(columns, np.int64))
        spans = self._newest[1]
        ends = (spans[:2] + spans[2]).max(axis=1)
        inside = spans[:2].min() >= 0 and spans[2].min() >= 1 and (ends <= (len(source), len(target))).all()
        return Move(source, target, spans) if inside else None

    def _copier(self, move: Move) -> PageCopier:
        way = move.source.device, move.target.device
        if way not in self._copiers:
            self._copiers[way] = PageCopier(*way)
        return self._copiers[way]


def _stream(device: torch.device) -> Any:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return device_module_of(device).Stream()


def _sent(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device; from pinned memory, as any other source would be waited for."""
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def _bytes(pages: torch.Tensor) -> int:
    """Of one page."""
    return pages.shape[1] * pages.element_size()


def _wide(pages: torch.Tensor) -> torch.Tensor:
    """The same pages in the widest elements that they fill, which index kernels move fastest."""
    return pages.view(torch.int64 if _bytes(pages) % 8 == 0 else torch.uint8)

"""The wire, the regions and the tcp transport within one process: what processes can't be made to do on order."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.transports import speed
from harness.transports.book import Address, AddressBook
from harness.transports.host import PeerHost, RemoteError
from harness.transports.library import MissingLibraryError, load
from harness.transports.mooncake import MooncakeTransport
from harness.transports.nixl import NixlTransport
from harness.transports.regions import OutOfRegionError, Place, Regions
from harness.transports.seat import stamp
from harness.transports.tcp import TcpTransport
from harness.transports.wire import HEAD
from kvshard_ref.errors import MisuseError
from kvshard_ref.transport import DONE, FAILED, PENDING, Block, PeerLostError, Ticket

register_cpu_ci(est_time=15, stage="commit")

PAGES, PAGE_BYTES = 8, 24


class Ends:
    """P and D with one region, kv.0; P is connected to D."""

    def __init__(self, book: Path) -> None:
        self.book = book
        self.p, self.d = TcpTransport("P", book), TcpTransport("D", book)
        self.source, self.target = (torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8) for _ in range(2))
        self.p.register({"kv.0": self.source})
        self.d.register({"kv.0": self.target})
        self.p.connect("D")

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(tmp_path)
    try:
        yield ends
    finally:
        ends.close()


def wait(true: Callable[[], object], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def outcome(ticket: Ticket) -> str:
    wait(lambda: ticket.poll() != PENDING)
    return ticket.poll()


class TestTcp:
    def test_the_target_checks_too(self, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
        """A writer that believes in wrong pages is refused by the target: all of the write, and the link lives on."""
        ends.source.fill_(1)
        with monkeypatch.context() as patch:
            patch.setattr("harness.transports.tcp.places_of", lambda link: {"kv.0": Place(100, PAGE_BYTES, 0)})
            blocks = [Block("kv.0", 0, 0, 4), Block("kv.0", 0, PAGES - 1, 2)]
            assert FAILED == outcome(ends.p.write("D", blocks))
        assert 0 == int(ends.target.sum())
        assert DONE == outcome(ends.p.write("D", [Block("kv.0", 0, 0, 4)]))
        assert 4 * PAGE_BYTES == int(ends.target.sum())

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        writes=st.lists(
            st.lists(st.builds(Block, st.just("kv.0"), *[st.integers(-1, PAGES)] * 2, st.integers(0, 3)), max_size=5),
            max_size=4,
        ),
        seed=st.integers(1, 99),
    )
    def test_any_writes(self, ends: Ends, writes: list[list[Block]], seed: int) -> None:
        """Writes with a bad block change nothing, and the others do what copies in their order do."""
        ends.source.copy_(stamp(seed, PAGES, PAGE_BYTES))
        ends.target.copy_(stamp(seed + 1, PAGES, PAGE_BYTES))
        want = ends.target.clone()
        wanted = []
        for blocks in writes:
            good = all(
                count > 0 and min(src, dst) >= 0 and max(src, dst) + count <= PAGES for _, src, dst, count in blocks
            )
            wanted.append(DONE if good else FAILED)
            for _, src, dst, count in blocks if good else []:
                want[dst : dst + count] = ends.source[src : src + count]
        tickets = [ends.p.write("D", blocks) for blocks in writes]
        assert wanted == [outcome(ticket) for ticket in tickets]
        assert torch.equal(want, ends.target)

    def test_never_connected(self, ends: Ends) -> None:
        """A write or a message to a peer that was never connected is misuse, and says who is."""
        for call in (lambda: ends.p.write("X", []), lambda: ends.p.notify("X", b"")):
            with pytest.raises(MisuseError, match=r"'X' was never connected, only \['D'\]"):
                call()

    def test_registered_late(self, ends: Ends) -> None:
        """A peer that is connected learns of regions that are registered later."""
        late = torch.zeros(2, 4)
        ends.p.register({"late.0": torch.ones(2, 4)})
        ends.d.register({"late.0": late})
        assert wait(lambda: outcome(ends.p.write("D", [Block("late.0", 0, 0, 2)])) == DONE)
        assert 8 == int(late.sum())

    def test_closed(self, ends: Ends) -> None:
        """close may be called twice; every other call says that the end is closed; the name is free again."""
        ends.p.close()
        ends.p.close()
        for call in (ends.p.messages, ends.p.lost, lambda: ends.p.connect("D"), lambda: ends.p.notify("D", b"")):
            with pytest.raises(RuntimeError, match="'P' is closed"):
                call()
        with pytest.raises(PeerLostError, match="no peer 'P'"):
            ends.d.connect("P")

    def test_close_sends_what_is_queued(self, ends: Ends) -> None:
        """A message that is larger than a socket takes arrives though its sender closes at once."""
        message = bytes(range(256)) * (1 << 16)
        ends.p.notify("D", message)
        ends.p.close()
        assert wait(lambda: ends.d.lost() == {"P"})
        assert [("P", message)] == ends.d.messages()

    def test_close_ends_tickets(self, ends: Ends) -> None:
        """What the peer has not answered when an end closes has failed or is done, and stays so."""
        ticket = ends.p.write("D", [Block("kv.0", 0, 0, PAGES)])
        ends.p.close()
        assert ticket.poll() in {DONE, FAILED}
        assert ticket.poll() == ticket.poll()

    def test_an_end_of_the_same_name(self, ends: Ends) -> None:
        """A second end with a name takes it: who knew the first finds it lost when the second turns up."""
        heir = TcpTransport("P", ends.book)
        try:
            heir.connect("D")
            assert wait(lambda: ends.d.lost() == {"P"})
            ends.d.connect("P")
            ends.d.notify("P", b"to the heir")
            assert wait(lambda: [("D", b"to the heir")] == heir.messages())
            assert wait(lambda: ends.p.lost() == {"D"})
        finally:
            heir.close()


class TestWire:
    def test_stale_address(self, ends: Ends) -> None:
        """A port of the address book that another end has now is not taken for the peer."""
        book = AddressBook(ends.book)
        address = book.find("D")
        assert address is not None
        book.publish("old", Address(address.port, "0123456789abcdef"))
        with pytest.raises(PeerLostError, match="'old'"):
            ends.p.connect("old")
        book.publish("older", Address(unused_port(), "0123456789abcdef"))
        with pytest.raises(PeerLostError, match="'older' does not answer"):
            ends.p.connect("older")

    @pytest.mark.parametrize(
        "noise",
        [
            b"GET / HTTP/1.1\r\n\r\n" * 9,
            HEAD.pack(1 << 31, 0),
            HEAD.pack(2, 0) + b"{}",
            HEAD.pack(4, 0) + b"nope",
            HEAD.pack(18, 1 << 60) + b'{"kind": "message"',
            HEAD.pack(17, 0) + b'{"kind": "hello"}',
            HEAD.pack(17, 0) + b'{"kind": "write"}',
            HEAD.pack(9, 3),
        ],
    )
    def test_noise(self, ends: Ends, noise: bytes) -> None:
        """Who sends something else than frames is cut off, and the peers are not disturbed."""
        address = AddressBook(ends.book).find("D")
        assert address is not None
        with socket.create_connection(("127.0.0.1", address.port), timeout=10) as stranger:
            with contextlib.suppress(OSError):  # cut off already
                stranger.sendall(noise)
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # cut off with some of the noise unread
                assert b"" == stranger.recv(1)
        ends.p.notify("D", b"still here")
        assert wait(lambda: [("P", b"still here")] == ends.d.messages())
        assert set() == ends.d.lost()

    def test_fault_is_raised(self, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
        """An error in the wire's thread is raised in the caller's, with its cause, and the peer sees the end."""

        def broken(*_: object) -> None:
            raise ZeroDivisionError("planned")

        monkeypatch.setattr(ends.d, "arrived", broken)
        assert FAILED == outcome(ends.p.write("D", [Block("kv.0", 0, 0, 1)]))
        with pytest.raises(RuntimeError, match=r"wire of 'D' has stopped") as caught:
            ends.d.messages()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


class TestRegions:
    @pytest.mark.parametrize(
        ("tensor", "what"),
        [
            (torch.zeros(4, 8).t(), "contiguous"),
            (torch.zeros(4, 8, 2), "contiguous"),
            (torch.zeros(4, 8)[:, :4], "contiguous"),
            (torch.zeros(4, 8, device="meta"), "memory of the CPU"),
        ],
    )
    def test_refused(self, tensor: torch.Tensor, what: str) -> None:
        """Only contiguous [pages, elements] of the CPU can be registered; nothing is when one is refused."""
        regions = Regions()
        with pytest.raises(MisuseError, match=what):
            regions.add({"good": torch.zeros(1, 1), "bad": tensor})
        assert {} == regions.places()

    def test_twice(self) -> None:
        """A name is registered once."""
        regions = Regions()
        regions.add({"kv.0": torch.zeros(1, 1)})
        with pytest.raises(MisuseError, match=r"'kv.0'.*registered already"):
            regions.add({"kv.0": torch.zeros(1, 1)})

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
    def test_bytes(self, dtype: torch.dtype) -> None:
        """Page sizes are bytes of the tensor's dtype, and the view is the tensor's own memory."""
        regions, tensor = Regions(), torch.zeros(3, 5, dtype=dtype)
        regions.add({"kv.0": tensor})
        size = tensor.element_size() * 5
        assert {"kv.0": (3, size, tensor.data_ptr())} == regions.places()
        regions.bytes_at("kv.0", size, size)[:] = b"\x01" * size
        assert [0, 1, 0] == [int(bool(row.view(torch.uint8).any())) for row in tensor]

    def test_reason(self) -> None:
        """A block that does not fit is named with the pages that there are."""
        regions = Regions()
        regions.add({"kv.0": torch.zeros(4, 8)})
        with pytest.raises(OutOfRegionError, match=r"destination pages 3\.\.4 of region 'kv.0', expected pages 0\.\.3"):
            regions.spans([Block("kv.0", 0, 3, 2)], regions.places())


class TestLibraries:
    def test_missing(self) -> None:
        """A library that is not installed is named with the command that installs it."""
        with pytest.raises(MissingLibraryError, match=r"none of no_such_module.x is installed.*pip install this"):
            load("x", ["no_such_module.x"], "pip install this")

    def test_broken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A library that cannot be loaded is an error with the reason."""
        (tmp_path / "broken_library.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(MissingLibraryError, match=r"libibverbs.so.1: no such file.*apt-get"):
            load("x", ["broken_library"], "apt-get install it")

    def test_nixl_needs_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """NIXL is not started where UCX would listen on every interface."""
        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
        monkeypatch.setattr("harness.transports.nixl.load", lambda *_: None)
        with pytest.raises(MisuseError, match="UCX_NET_DEVICES is not set"):
            NixlTransport("P", tmp_path)

    def test_mooncake_needs_a_namespace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Mooncake is not started where there is an interface that others can reach."""
        monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
        with pytest.raises(MisuseError, match="eth0, lo; expected lo alone"):
            MooncakeTransport("P", tmp_path)


class TestCommands:
    def test_speed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The speed of tcp is a line with times and rates."""
        assert 0 == speed.main(["tcp", "--mib", "1", "--repeats", "1"])
        line = capsys.readouterr().out
        assert line.startswith("tcp")
        assert 3 == line.count("GB/s")

    def test_speed_of_what(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A name that is no transport is an error that lists those there are."""
        with pytest.raises(SystemExit):
            speed.main(["pigeon"])
        assert "no transport pigeon, expected of tcp, nixl, mooncake" in capsys.readouterr().err

    def test_remote_error(self, tmp_path: Path) -> None:
        """An error in a peer's process comes with its name and text, and the peer lives on."""
        with PeerHost("tcp", tmp_path) as host:
            peer = host.start("P")
            with pytest.raises(RemoteError, match=r"KeyError: 'kv.9'"):
                peer.call("digest", region="kv.9")
            assert [] == peer.call("messages")


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def test_optional_stay_out() -> None:
    """Importing the transports imports none of the optional libraries."""
    assert [] == [name for name in sys.modules if name.partition(".")[0] in {"nixl", "nixl_cu12", "mooncake"}]

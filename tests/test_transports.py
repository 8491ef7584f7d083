"""One suite for every transport: what kvshard_ref.transport promises, between processes where there are any."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ci.register import register_cpu_ci
from harness.transports.host import ALONE, ENVIRONMENT, PeerGoneError, PeerHost, RemoteError
from harness.transports.seat import Seat, digest, stamp
from kvshard_ref.transport import Block
from tests.transport_peers import KINDS, AnyPeer, Net, pid_of

register_cpu_ci(est_time=35, stage="commit")

PAGES, PAGE_BYTES = 256, 1 << 16  # 16 MiB, more than sockets buffer
ALL = ["kv.0", 0, 0, PAGES]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Copies of this process and of its peers must not fight for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=KINDS)
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    net = Net(request.param, tmp_path_factory.mktemp(request.param))
    try:
        yield net
    finally:
        net.close()


@pytest.fixture(scope="module")
def pair(net: Net) -> tuple[AnyPeer, AnyPeer]:
    """P and D, connected by P; they live as long as the module."""
    regions = {"kv_0": [PAGES, PAGE_BYTES], "index_0": [40, 96]}
    prefill = net.start("P", **regions, odd_0=[4, 100])
    decode = net.start("D", **regions, odd_0=[4, 200])
    prefill.call("connect", peer="D")
    return prefill, decode


@pytest.fixture
def victims(net: Net) -> Iterator[tuple[AnyPeer, AnyPeer]]:
    """A pair of a test's own, for it to kill."""
    faults = net.network.faults
    prefill, decode = (net.start(name, kv_0=[PAGES, PAGE_BYTES]) for name in ("p", "d"))
    prefill.call("fill", region="kv.0", seed=3)
    prefill.call("connect", peer="d")
    try:
        yield prefill, decode
    finally:
        net.network.faults = faults
        prefill.kill()
        decode.kill()


def put(peer: AnyPeer, to: str, *blocks: list[Any], seconds: float = 20.0) -> Any:
    """How a write ends."""
    return peer.call("wait", ticket=peer.call("write", peer=to, blocks=blocks), seconds=seconds)


def error_of(asked: AnyPeer, op: str, **arguments: Any) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        asked.call(op, **arguments)
    return caught.value


class TestWrites:
    def test_every_byte(self, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """A region of 16 MiB arrives as it was."""
        prefill, decode = pair
        want = prefill.call("fill", region="kv.0", seed=1)
        decode.call("fill", region="kv.0", seed=0)
        assert "done" == put(prefill, "D", ALL)
        assert want == decode.call("digest", region="kv.0")

    def test_many_blocks(self, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """Scattered pages and runs of two regions land where they are sent, and no other page changes."""
        prefill, decode = pair
        rng, blocks = random.Random(5), []
        want: dict[str, torch.Tensor] = {}
        for region, pages, page_bytes in (("kv.0", PAGES, PAGE_BYTES), ("index.0", 40, 96)):
            for peer, seed in ((prefill, 7), (decode, 8)):
                peer.call("fill", region=region, seed=seed)
            source, want[region] = stamp(7, pages, page_bytes), stamp(8, pages, page_bytes)
            runs = rng.sample(range(pages // 4), pages // 8)
            for run, count in zip(runs, rng.choices(range(1, 5), k=len(runs)), strict=True):
                src = rng.randrange(pages - count)
                blocks.append([region, src, 4 * run, count])
                want[region][4 * run : 4 * run + count] = source[src : src + count]
        rng.shuffle(blocks)
        assert "done" == put(prefill, "D", *blocks)
        for region, content in want.items():
            assert digest(content) == decode.call("digest", region=region)

    def test_few_pages(self, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """Pages 4, 9, 12 go to 70, 71, 72: two blocks of one write."""
        prefill, decode = pair
        prefill.call("fill", region="kv.0", seed=2)
        source = stamp(2, PAGES, PAGE_BYTES)[[4, 9, 12]]
        assert "done" == put(prefill, "D", ["kv.0", 4, 70, 1], ["kv.0", 9, 71, 1], ["kv.0", 12, 72, 1])
        have = base64.b64decode(decode.call("pages", region="kv.0", pages=[70, 71, 72]))
        assert source.numpy().tobytes() == have

    @pytest.mark.parametrize(
        "bad",
        [
            ["kv.0", 0, PAGES - 1, 2],
            ["kv.0", 0, PAGES, 1],
            ["kv.0", 0, -1, 1],
            ["kv.0", PAGES, 0, 1],
            ["kv.0", -1, 0, 1],
            ["kv.0", 0, 0, 0],
            ["kv.0", 0, 0, -1],
            ["kv.7", 0, 0, 1],
            ["odd.0", 0, 0, 1],
        ],
    )
    def test_outside(self, pair: tuple[AnyPeer, AnyPeer], bad: list[Any]) -> None:
        """A block outside a region, or of another page size, fails its write, and its good blocks are not written."""
        prefill, decode = pair
        prefill.call("fill", region="index.0", seed=1)
        before = [decode.call("fill", region="index.0", seed=4), decode.call("digest", region="odd.0")]
        assert "failed" == put(prefill, "D", ["index.0", 0, 0, 40], bad)
        assert before == [decode.call("digest", region=region) for region in ("index.0", "odd.0")]

    def test_nothing(self, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """A write of no block is done."""
        assert "done" == put(pair[0], "D")

    def test_both_ways(self, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """D, which never connected, writes to P."""
        prefill, decode = pair
        want = decode.call("fill", region="index.0", seed=9)
        assert "done" == put(decode, "P", ["index.0", 0, 0, 40])
        assert want == prefill.call("digest", region="index.0")

    def test_two_writers(self, net: Net, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """Two peers write to one at once, each its own half."""
        writers, half = [pair[0], net.start("P1", kv_0=[PAGES, PAGE_BYTES])], PAGES // 2
        writers[1].call("connect", peer="D")
        want = torch.cat([stamp(seed, PAGES, PAGE_BYTES)[:half] for seed in (20, 21)])
        for rank, writer in enumerate(writers):
            writer.call("fill", region="kv.0", seed=20 + rank)
        for rank, writer in enumerate(writers):
            blocks = [["kv.0", page, rank * half + page, 1] for page in range(half)]
            writer.begin("write_and_tell", peer="D", blocks=blocks, message=f"half {rank}")
        assert ["done", "done"] == [writer.answer() for writer in writers]
        assert [["P", "half 0"], ["P1", "half 1"]] == sorted(pair[1].call("wait_messages", count=2))
        assert digest(want) == pair[1].call("digest", region="kv.0")
        writers[1].kill()


class TestMessages:
    def test_order(self, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """Messages arrive once, in order, in both directions, long and empty ones too."""
        texts = [f"{k}" * (k % 7 * 100) for k in range(60)]
        for text in texts:
            pair[0].call("notify", peer="D", message=text)
            pair[1].call("notify", peer="P", message=text[::-1])
        assert [["P", text] for text in texts] == pair[1].call("wait_messages", count=60)
        assert [["D", text[::-1]] for text in texts] == pair[0].call("wait_messages", count=60)
        assert [] == pair[1].call("messages")

    @pytest.mark.parametrize("count", [1, 64])
    def test_behind_the_data(self, pair: tuple[AnyPeer, AnyPeer], count: int) -> None:
        """When a message is read, all that was written and done before it is there."""
        prefill, decode = pair
        size = PAGES // count
        for seed in (31, 32, 33):
            prefill.call("fill", region="kv.0", seed=seed)
            decode.begin("await_pages", region="kv.0", seed=seed)
            blocks = [["kv.0", k * size, k * size, size] for k in range(count)]
            assert "done" == prefill.call("write_and_tell", peer="D", blocks=blocks, message="done")
            assert [] == decode.answer()

    def test_the_check_sees(self) -> None:
        """The check above reports the pages that a transport calls done too early."""

        class Hasty:
            name = "D"

            def register(self, regions: dict[str, torch.Tensor]) -> None:
                regions["kv.0"][:3] = stamp(1, 4, 8)[:3]

            def messages(self) -> list[tuple[str, bytes]]:
                return [("P", b"done")]

        seat = Seat(Hasty())  # type: ignore[arg-type]  # it needs no more than this
        seat.register({"kv.0": [4, 8]})
        assert [3] == seat.await_pages("kv.0", 1)


class TestDeath:
    def test_before(self, victims: tuple[AnyPeer, AnyPeer]) -> None:
        """A peer killed while nothing is under way is lost; writes to it fail and messages raise."""
        prefill, decode = victims
        decode.kill()
        assert ["d"] == prefill.call("wait_lost", peer="d")
        assert "failed" == put(prefill, "d", ALL)
        assert "PeerLostError" == error_of(prefill, "notify", peer="d", message="hello").kind
        assert "PeerLostError" == error_of(prefill, "connect", peer="d").kind

    def test_at_once(self, net: Net, victims: tuple[AnyPeer, AnyPeer]) -> None:
        """A write in the moment of the death fails too, at the latest when the peer is seen to be lost."""
        if net.kind == "nixl":
            pytest.skip("nixl 1.5.1 itself crashes in transfer() in about 1 of 100 such moments")
        prefill, decode = victims
        decode.kill()
        assert "failed" == put(prefill, "d", ALL)
        assert ["d"] == prefill.call("wait_lost", peer="d")

    def test_during(self, net: Net, victims: tuple[AnyPeer, AnyPeer]) -> None:
        """A write under way to a peer that is killed ends failed, not pending."""
        prefill, decode = victims
        net.freeze(decode)
        ticket = prefill.call("write", peer="d", blocks=[ALL])
        assert "pending" == prefill.call("wait", ticket=ticket, seconds=0.3)
        decode.kill()
        assert ["d"] == prefill.call("wait_lost", peer="d")
        assert "failed" == prefill.call("wait", ticket=ticket)

    def test_after(self, victims: tuple[AnyPeer, AnyPeer]) -> None:
        """A done ticket stays done when the peer is killed."""
        prefill, decode = victims
        ticket = prefill.call("write", peer="d", blocks=[ALL])
        assert "done" == prefill.call("wait", ticket=ticket)
        decode.kill()
        assert ["d"] == prefill.call("wait_lost", peer="d")
        assert "done" == prefill.call("poll", ticket=ticket)

    def test_the_writer(self, victims: tuple[AnyPeer, AnyPeer]) -> None:
        """When the writer is killed, its last message is whole or missing, it is lost, and no more is written."""
        prefill, decode = victims
        prefill.call("notify", peer="d", message="chunk 0")
        assert [["p", "chunk 0"]] == decode.call("wait_messages", count=1)
        prefill.call("notify", peer="d", message="chunk 1")
        prefill.call("write", peer="d", blocks=[["kv.0", page, page, 1] for page in range(PAGES)])
        prefill.kill()
        assert ["p"] == decode.call("wait_lost", peer="p")
        assert decode.call("messages") in ([], [["p", "chunk 1"]])  # its process may have ended before it was sent
        want = decode.call("fill", region="kv.0", seed=50)
        time.sleep(0.3)
        assert want == decode.call("digest", region="kv.0")

    def test_reconnect_to_a_new_reader(self, net: Net, victims: tuple[AnyPeer, AnyPeer]) -> None:
        """A new process with the name of a dead one is reached by a new connect, and gets all that is sent then."""
        prefill, decode = victims
        want = prefill.call("digest", region="kv.0")
        decode.kill()
        prefill.call("wait_lost", peer="d")
        heir = net.start("d", kv_0=[PAGES, PAGE_BYTES])
        assert "failed" == put(prefill, "d", ALL)
        assert ["d"] == prefill.call("lost")
        prefill.call("connect", peer="d")
        assert [] == prefill.call("lost")
        assert "done" == prefill.call("write_and_tell", peer="d", blocks=[ALL], message="again")
        assert [["p", "again"]] == heir.call("wait_messages", count=1)
        assert want == heir.call("digest", region="kv.0")
        heir.kill()

    def test_reconnect_of_a_new_writer(self, net: Net, victims: tuple[AnyPeer, AnyPeer]) -> None:
        """A new writer's messages come through, but the reader answers it only after a connect of its own."""
        prefill, decode = victims
        prefill.kill()
        assert ["p"] == decode.call("wait_lost", peer="p")
        heir = net.start("p", kv_0=[PAGES, PAGE_BYTES])
        heir.call("connect", peer="d")
        heir.call("notify", peer="d", message="hello")
        assert [["p", "hello"]] == decode.call("wait_messages", count=1)
        assert ["p"] == decode.call("lost")
        assert "PeerLostError" == error_of(decode, "notify", peer="p", message="reserved").kind
        decode.call("connect", peer="p")
        decode.call("notify", peer="p", message="reserved")
        assert [["d", "reserved"]] == heir.call("wait_messages", count=1)
        assert [] == decode.call("lost")
        heir.kill()

    def test_close(self, victims: tuple[AnyPeer, AnyPeer]) -> None:
        """An end that closes has its messages delivered, and is lost."""
        prefill, decode = victims
        prefill.call("notify", peer="d", message="bye")
        prefill.call("close")
        assert ["p"] == decode.call("wait_lost", peer="p")
        assert [["p", "bye"]] == decode.call("messages")

    def test_unknown(self, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """A peer that never was there cannot be connected to; the error has its name."""
        error = error_of(pair[0], "connect", peer="nobody")
        assert "PeerLostError" == error.kind
        assert "'nobody'" in str(error)


class TestProcesses:
    def test_listens_on_loopback_only(self, net: Net, pair: tuple[AnyPeer, AnyPeer]) -> None:
        """No port of a peer is open to another machine: on 127.0.0.1 only, or in a network that has nothing but lo."""
        if net.kind == "memory":
            pytest.skip("memory has no process and no port")
        for peer in pair:
            pid = pid_of(peer)
            own, theirs = (Path(f"/proc/{one}/ns/net").readlink() for one in ("self", pid))
            listening = psutil.Process(pid).net_connections("tcp")
            hosts = {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN}
            assert own != theirs or {"127.0.0.1"} == hosts

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
    def test_none_is_left(self, kind: str, tmp_path: Path) -> None:
        """After close no process of a host is left, not even one that is stopped."""
        net = Net(kind, tmp_path)
        try:
            peers = [net.start(name, kv_0=[4, 16]) for name in ("a", "b")]
            net.freeze(peers[1])
            pids = [pid_of(peer) for peer in peers]
            assert [True, True] == [psutil.pid_exists(pid) for pid in pids]
        finally:
            net.close()
        assert [False, False] == [alive(pid) for pid in pids]

    def test_ends_well(self, net: Net, pair: tuple[AnyPeer, AnyPeer], tmp_path: Path) -> None:
        """A process that closes its ends, with a write behind it, exits with 0 and no word."""
        if net.kind in {"memory", *ALONE}:
            pytest.skip(f"{net.kind} is not for a process like any other")
        code = (
            "import pathlib, sys, torch; from harness.transports.peer import transport\n"
            "from kvshard_ref.transport import Block\n"
            "p, d = (transport(sys.argv[1], name, pathlib.Path(sys.argv[2])) for name in 'pd')\n"
            "[end.register({'kv.0': torch.ones(4, 8)}) for end in (p, d)]; p.connect('d')\n"
            "ticket = p.write('d', [Block('kv.0', 0, 0, 4)])\n"
            "while ticket.poll() == 'pending': pass\n"
            "assert ticket.poll() == 'done'; p.close(); d.close(); p.close()\n"
        )
        command = [sys.executable, "-c", code, net.kind, str(tmp_path)]
        environment = {**os.environ, **ENVIRONMENT.get(net.kind, {})}
        root = Path(__file__).parent.parent
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
        assert (0, "") == (done.returncode, done.stderr)

    def test_test_is_killed(self, tmp_path: Path) -> None:
        """Peers end by themselves when the process that started them is killed."""
        code = (
            "import json, pathlib, sys, time; from harness.transports.host import PeerHost\n"
            "host = PeerHost('tcp', pathlib.Path(sys.argv[1]))\n"
            "peers = [host.start(name) for name in 'ab']\n"
            "print(json.dumps([peer.pid for peer in peers]), flush=True); time.sleep(60)\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as parent:
            assert parent.stdout is not None
            pids = json.loads(parent.stdout.readline())
            assert [True, True] == [alive(pid) for pid in pids]
            parent.kill()
        end = time.monotonic() + 10
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.02)
        assert [False, False] == [alive(pid) for pid in pids]

    def test_asked_when_dead(self, tmp_path: Path) -> None:
        """A command to a dead peer is an error that names the peer, and no endless wait."""
        with PeerHost("tcp", tmp_path) as host:
            peer = host.start("gone")
            peer.kill()
            with pytest.raises(PeerGoneError, match="'gone'"):
                peer.call("messages")


def alive(pid: int) -> bool:
    """Whether it runs; a dead process that nobody has collected does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_block_fields() -> None:
    """The commands of the tests spell blocks as the core does."""
    assert ("region", "src_page", "dst_page", "count") == Block._fields

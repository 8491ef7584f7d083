from __future__ import annotations

import pytest
import torch

from ci.register import register_cpu_ci
from harness.transports.memory import Faults, MemoryEnd, Network
from kvshard_ref.transport import DONE, FAILED, PENDING, Block, PeerLostError

register_cpu_ci(est_time=10, stage="commit")

A_TO_B = [Block("kv.0", 1, 3, 2)]


def ends(faults: Faults | None = None) -> tuple[Network, MemoryEnd, MemoryEnd]:
    network = Network(faults)
    a, b = network.end("a"), network.end("b")
    a.register({"kv.0": torch.arange(10.0).reshape(5, 2)})
    b.register({"kv.0": torch.zeros(5, 2)})
    a.connect("b")
    return network, a, b


def pages(end: MemoryEnd) -> list[float]:
    return end.regions["kv.0"][:, 0].tolist()


def test_write_then_message() -> None:
    """Pages land where they are to go, both ends can tell the other, and a message arrives once."""
    _, a, b = ends()
    assert DONE == a.write("b", A_TO_B).poll()
    a.notify("b", b"there")
    b.notify("a", b"thanks")
    assert [0, 0, 0, 2, 4] == pages(b)
    assert ([("a", b"there")], []) == (b.messages(), b.messages())
    assert [("b", b"thanks")] == a.messages()


def test_delay_and_order() -> None:
    """Writes end after their ticks, so a later one may end first; polling a ticket lets no time pass."""
    _, a, b = ends(Faults(write_ticks=(3, 1)))
    first, second = a.write("b", [Block("kv.0", 1, 1, 1)]), a.write("b", [Block("kv.0", 2, 2, 1)])
    seen = []
    for _ in range(3):
        assert [first.poll(), second.poll()] == [first.poll(), second.poll()]
        b.messages()
        seen.append((first.poll(), second.poll(), pages(b)[1:3]))
    assert [(PENDING, DONE, [0, 4]), (PENDING, DONE, [0, 4]), (DONE, DONE, [2, 4])] == seen


def test_source_is_read_when_it_lands() -> None:
    """A source that changes while its write is under way spoils the write, and the network tells which page it was."""
    network, a, b = ends(Faults(write_ticks=(1,)))
    a.write("b", A_TO_B)
    a.regions["kv.0"].fill_(9)
    b.messages()
    assert [0, 0, 0, 9, 9] == pages(b)
    assert network.landed == network.changed
    assert 2 == len(network.changed)


def test_source_that_stays() -> None:
    """Pages that keep their rows until they have landed, even torn ones, or change afterwards are not told."""
    network, a, b = ends(Faults(write_ticks=(2,), torn=True))
    a.write("b", A_TO_B)
    for _ in range(3):
        b.messages()
    a.regions["kv.0"].fill_(9)
    assert 2 == len(network.landed)
    assert [] == network.changed


def test_half_changed() -> None:
    """Of a torn write only the half that had not landed can change."""
    network, a, b = ends(Faults(write_ticks=(1,), torn=True))
    a.write("b", A_TO_B)
    a.regions["kv.0"].fill_(9)
    b.messages()
    assert network.landed[1:] == network.changed


def test_torn() -> None:
    """Half of a torn write is there before its ticket is done."""
    _, a, b = ends(Faults(write_ticks=(1,), torn=True))
    ticket = a.write("b", A_TO_B)
    assert (PENDING, [0, 0, 0, 2, 0]) == (ticket.poll(), pages(b))
    b.messages()
    assert (DONE, [0, 0, 0, 2, 4]) == (ticket.poll(), pages(b))


def test_messages_keep_their_order() -> None:
    """A slow message holds up those behind it; a repeated one comes again, behind later ones."""
    _, a, b = ends(Faults(message_ticks=(3, 0, 0), repeat_ticks=(0, 2, 0)))
    for text in (b"1", b"2", b"3"):
        a.notify("b", text)
    assert [[], [], [b"1", b"2", b"3"], [], [b"2"]] == [[m for _, m in b.messages()] for _ in range(5)]


@pytest.mark.parametrize(
    "block", [Block("kv.0", 4, 0, 2), Block("kv.0", 0, 4, 2), Block("kv.0", -1, 0, 1), Block("kv.1", 0, 0, 1)]
)
def test_out_of_region(block: Block) -> None:
    """A write that leaves a region of either side fails and changes nothing, its good blocks included."""
    _, a, b = ends()
    assert FAILED == a.write("b", [Block("kv.0", 1, 1, 1), block]).poll()
    assert [0] * 5 == pages(b)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_loss(gone: str) -> None:
    """From its tick on an end is gone: writes of both fail and never land, messages stop, both ends see it."""
    network, a, b = ends(Faults(write_ticks=(5,), message_ticks=(5,), lost={gone: 2}))
    ticket = a.write("b", A_TO_B)
    a.notify("b", b"?")
    b.messages()
    assert (PENDING, set(), set()) == (ticket.poll(), a.lost(), b.lost())
    b.messages()
    assert (FAILED, {"b"}, {"a"}) == (ticket.poll(), a.lost(), b.lost())
    with pytest.raises(PeerLostError, match="'a' to 'b'"):
        a.notify("b", b"!")
    assert FAILED == a.write("b", A_TO_B).poll()
    assert [[]] * 8 == [b.messages() for _ in range(8)]
    assert ([0] * 5, []) == (pages(b), network.landed)


def test_name_comes_back() -> None:
    """A new end of a lost name can say something; until it is connected to, it is lost and cannot be told anything."""
    network, a, _ = ends()
    fresh = network.end("b")
    fresh.register({"kv.0": torch.zeros(5, 2)})
    fresh.connect("a")
    fresh.notify("a", b"hello")
    assert ({"b"}, [("b", b"hello")]) == (a.lost(), a.messages())
    with pytest.raises(PeerLostError):
        a.notify("b", b"?")
    a.connect("b")
    a.notify("b", b"!")
    assert (set(), [("a", b"!")]) == (a.lost(), fresh.messages())
    assert DONE == a.write("b", A_TO_B).poll()
    assert [0, 0, 0, 2, 4] == pages(fresh)


def test_unknown_peer() -> None:
    """A name that nobody has cannot be connected; a peer that was not connected cannot be written to."""
    network, a, _ = ends()
    network.end("c")
    with pytest.raises(PeerLostError, match="'nobody'"):
        a.connect("nobody")
    with pytest.raises(ValueError, match="connect first"):
        a.write("c", A_TO_B)


def test_close() -> None:
    """An end that is closed is lost to its peers, and they to it."""
    _, a, b = ends()
    a.close()
    assert ({"b"}, {"a"}) == (a.lost(), b.lost())

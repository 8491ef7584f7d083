"""The real sglang components behind the contract: that the adapter drives them, and that it would see them fail."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from msgspec.structs import replace

from ci.register import register_cpu_ci
from harness import types as t
from harness.adapter import ConfigError, EngineFault
from harness.adapters.ref_rows import TORN
from harness.adapters.sglang import SglangEngine, SglangSession
from harness.adapters.sglang_device import LazyStream
from harness.smoke import stamps

register_cpu_ci(est_time=45, stage="commit", runner="ubuntu-sglang")

pytestmark = [
    pytest.mark.slow,  # sglang takes many seconds to import
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
CONFIG = t.Config(
    shards=4,
    page_size=4,
    pages_per_rank=8,
    layers=3,
    components=("kv", "draft"),
    chunk_tokens=112,
    context_tokens=128,
)
INDEXED = replace(
    CONFIG,
    page_size=64,
    pages_per_rank=4,
    components=("kv", "index", "draft", "draft_index"),
    chunk_tokens=640,
    context_tokens=1024,
)
Opener = Callable[..., SglangSession]


@pytest.fixture(params=["mha", "mla"])
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens sessions that are closed at the end."""
    sessions: list[SglangSession] = []

    def make(config: t.Config = CONFIG, **options: str) -> SglangSession:
        sessions.append(SglangEngine(options).open(config))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def prompt(start: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(start, start + tokens))


def rows(tokens: tuple[int, ...], start: int, end: int, config: t.Config = CONFIG) -> t.Rows:
    return {name: tuple(layer[start:end] for layer in layers) for name, layers in stamps(tokens, config).items()}


def value(reply: t.AnyReply) -> t.AnyValue:
    assert isinstance(reply, t.Ok), reply
    return reply.value


def chunk(session: SglangSession, name: str, tokens: tuple[int, ...], start: int, end: int) -> t.Extended:
    done = value(session.apply(t.Extend(name, end - start, rows(tokens, start, end))))
    assert isinstance(done, t.Extended)
    return done


def serve(session: SglangSession, name: str, tokens: tuple[int, ...]) -> t.Extended:
    """A whole request in one chunk, behind its hit."""
    hit = value(session.apply(t.Open(name, tokens)))
    assert isinstance(hit, t.Opened)
    done = chunk(session, name, tokens, hit.cached, len(tokens))
    value(session.apply(t.Finish(name)))
    return done


class TestRows:
    def test_chunks_and_hit(self, opened: Opener, attention: str) -> None:
        """A prompt in two chunks and its repeat read every row of every layer, on every rank."""
        session, tokens = opened(attention=attention), prompt(1, 25)
        session.apply(t.Open("a", tokens))
        reads = [chunk(session, "a", tokens, 0, 16).reads, chunk(session, "a", tokens, 16, 25).reads]
        kept = value(session.apply(t.Finish("a")))
        again = serve(session, "b", tokens)
        whole = (rows(tokens, 0, 25),) * 4
        assert ([(rows(tokens, 0, 16),) * 4, whole], t.Finished(24), (24, 25, whole)) == (
            reads,
            kept,
            (again.start, again.end, again.reads),
        )

    def test_skipped_wait(self, opened: Opener, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Attention that does not wait for the gather reads what was in the scratch before."""
        session, tokens = opened(attention=attention), prompt(1, 25)
        serve(session, "a", tokens)
        monkeypatch.setattr(LazyStream, "wait_event", lambda *_: None)
        assert (rows(tokens, 0, 25),) * 4 != serve(session, "b", tokens).reads

    def test_from_host(self, opened: Opener, attention: str) -> None:
        """A prefix that left the device comes back from the host with the rows of its first computation."""
        config = replace(CONFIG, host_pages_per_rank=16)
        session, tokens = opened(config, attention=attention), prompt(1, 25)
        serve(session, "a", tokens)
        session.apply(t.Settle())
        session.apply(t.Evict(1000))
        serve(session, "other", prompt(100, 105))
        session.apply(t.Evict(1000))
        hit = value(session.apply(t.Open("b", tokens)))
        reads = chunk(session, "b", tokens, 24, 25).reads
        assert (t.Opened(24, 24), (rows(tokens, 0, 25),) * 4) == (hit, reads)

    def test_load_that_nobody_waits_for(self, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        """A gather that does not wait for the copies from the host sends rows of before."""
        config = replace(CONFIG, host_pages_per_rank=16)
        session, tokens = opened(config), prompt(1, 25)
        serve(session, "a", tokens)
        session.apply(t.Settle())
        session.apply(t.Evict(1000))
        serve(session, "other", prompt(100, 105))
        session.apply(t.Evict(1000))
        session.apply(t.Open("b", tokens))
        counter = importlib.import_module("sglang.srt.managers.cache_controller").LayerDoneCounter
        monkeypatch.setattr(counter, "wait_until", lambda *_: None)
        assert (rows(tokens, 0, 25),) * 4 != chunk(session, "b", tokens, 24, 25).reads

    @pytest.mark.parametrize("part", ["k_buffer", "v_buffer"])
    def test_torn_draft_row(self, opened: Opener, part: str) -> None:
        """A draft's key without its value, or the other way round, is no row that anybody wrote."""
        session, tokens = opened(), prompt(1, 25)
        serve(session, "a", tokens)
        for rank in session._ranks:
            getattr(rank._core.models[1].rows.pool, part)[0].view(torch.int64).add_(1)
        read = serve(session, "b", tokens).reads[0]
        assert (rows(tokens, 0, 25)["kv"], {TORN}) == (read["kv"], set(read["draft"][0][:24]))

    def test_draft_of_two_layers(self) -> None:
        """A draft has one layer: more is refused with what is possible."""
        with pytest.raises(ConfigError, match=r"draft_layers=2; the engine can be opened with \(1,\)"):
            SglangEngine().open(replace(CONFIG, draft_layers=2))


class TestIndexer:
    """Attention of the kind dsa, which has rows of an indexer besides, whole pages at a time, also in a draft."""

    def test_hit(self, opened: Opener) -> None:
        """A prompt and its repeat read every row of target and draft and of both indexers, on every rank."""
        session, tokens = opened(INDEXED, attention="dsa"), prompt(1, 200)
        whole = (rows(tokens, 0, 200, INDEXED),) * 4
        session.apply(t.Open("a", tokens))
        first = value(session.apply(t.Extend("a", 200, whole[0])))
        session.apply(t.Finish("a"))
        session.apply(t.Open("b", tokens))
        again = value(session.apply(t.Extend("b", 8, rows(tokens, 192, 200, INDEXED))))
        assert [t.Extended(0, 200, whole), t.Extended(192, 200, whole)] == [first, again]

    @pytest.mark.parametrize("part", ["keys", "scales"])
    def test_torn_row(self, opened: Opener, part: str) -> None:
        """An indexer key without its scale, or the other way round, is no row that anybody wrote."""
        session, tokens = opened(INDEXED, attention="dsa"), prompt(1, 65)
        session.apply(t.Open("a", tokens))
        session.apply(t.Extend("a", 65, rows(tokens, 0, 65, INDEXED)))
        for rank in session._ranks:
            pages = rank._core.pool.index_key_cache.buffer[0]
            (pages[:, : 64 * 128] if part == "keys" else pages[:, 64 * 128 :]).add_(1)
        session.apply(t.Finish("a"))
        session.apply(t.Open("b", tokens))
        again = value(session.apply(t.Extend("b", 1, rows(tokens, 64, 65, INDEXED))))
        assert isinstance(again, t.Extended)
        assert {(-1,) * 64} == {read["index"][0][:64] for read in again.reads}


class TestAdmission:
    def test_over_admission(self, opened: Opener) -> None:
        """One-page prompts held on one owner, and a long prompt that the adder accepts: sglang runs out of pages."""
        config = t.Config(shards=2, page_size=4, pages_per_rank=7, layers=1, chunk_tokens=112, context_tokens=128)
        session = opened(config, host="off")
        for number in range(10):
            tokens, name = prompt(100 * number, 4), f"r{number}"
            session.apply(t.Open(name, tokens))
            session.apply(t.Extend(name, 4, {"kv": (tuple(range(4)),)}))
            (rank, _) = session.snapshot().ranks
            if (rank.requests or {})[name].pages[0] % 2 == 0:
                session.apply(t.Finish(name))
        session.apply(t.Open("long", prompt(5000, 24)))
        with pytest.raises(EngineFault, match="Prefill out of memory"):
            session.apply(t.Extend("long", 24, {"kv": (tuple(range(24)),)}))

    def test_one_between_chunks(self, opened: Opener) -> None:
        """While a request is between its chunks, a chunk of another alone is refused, and one with it is taken."""
        session = opened()
        first, second = prompt(1, 25), prompt(100, 5)
        session.apply(t.Open("a", first))
        session.apply(t.Open("b", second))
        chunk(session, "a", first, 0, 16)
        b = t.Extend("b", 5, rows(second, 0, 5))
        alone = session.apply(b)
        both = session.apply(t.Together((b, t.Extend("a", 9, rows(first, 16, 25)))))
        assert isinstance(both, t.Replies)
        assert (t.Refused, [t.Ok, t.Ok]) == (type(alone), [type(reply) for reply in both.replies])


class TestSession:
    def test_ranks_are_mirrored(self, opened: Opener) -> None:
        """Free lists, requests and trees are the same on all ranks."""
        session = opened()
        serve(session, "a", prompt(1, 25))
        session.apply(t.Open("b", prompt(1, 20)))
        views = session.snapshot().ranks
        assert [(views[0].free, views[0].requests, views[0].nodes)] * 4 == [
            (view.free, view.requests, view.nodes) for view in views
        ]

    def test_sessions_are_apart(self, opened: Opener) -> None:
        """What one session caches, another with another host policy does not hit."""
        one = opened()
        serve(one, "a", prompt(1, 25))
        config = replace(CONFIG, host_pages_per_rank=8, host_policy="write_back")
        hits = [value(session.apply(t.Open("b", prompt(1, 25)))) for session in (opened(config), one)]
        assert [t.Opened(0), t.Opened(24)] == hits

    def test_restart(self, opened: Opener) -> None:
        """After a restart the session is as a fresh one."""
        session = opened()
        fresh = session.snapshot()
        serve(session, "a", prompt(1, 25))
        session.apply(t.Restart())
        session.apply(t.Settle())
        assert fresh == session.snapshot()


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"attention": "gqa"}, "attention='gqa' of engine sglang; expected one of mha, mla"),
            ({"shards": "5"}, "shards='5' of engine sglang; expected one of 2, 3, 4, 8"),
            ({"tree": "rust", "host": "on"}, "host='on' of engine sglang; expected one of off"),
            ({"device": "gpu"}, "device='gpu' of engine sglang; expected one of host, adversary, order"),
            ({"stream": "1"}, "option 'stream' of engine sglang; expected shards"),
        ],
    )
    def test_wrong_option(self, options: dict[str, str], message: str) -> None:
        """A wrong option is told with what is possible."""
        with pytest.raises(ConfigError, match=message):
            SglangEngine(options)

    def test_wrong_config(self) -> None:
        """A config outside the axes is refused with the field that is wrong."""
        with pytest.raises(ConfigError, match="page_size=1; the engine can be opened with"):
            SglangEngine({}).open(t.Config(shards=2, page_size=1))

"""The flood of tiny and long requests: what it says of answers, errors and what is left, and what of real servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import flood
from ci.register import register_cpu_ci
from harness.types import (
    AnyOp,
    AnyReply,
    Axes,
    Config,
    Done,
    Generate,
    Generated,
    Manifest,
    Ok,
    Refused,
    Replies,
    Service,
    Together,
    Unknown,
)
from harness.views import RankView, Snapshot

register_cpu_ci(est_time=100, stage="commit")

ROOT = Path(__file__).parents[1]
CONFIG = Config(page_size=16, context_tokens=512, pages_per_rank=64)


def right(op: Generate) -> Generated:
    return Generated(tokens=(sum(op.tokens) % 97, 1, 2, 3), logprobs=(-0.5,) * 4, finish="length")


def other(tokens: tuple[int, ...] | None, score: float) -> Callable[[Generate], AnyReply]:
    """An answer of these tokens, or the right ones, with these log probabilities."""
    return lambda op: Ok(Generated(tokens=tokens or right(op).tokens, logprobs=(score,) * 4, finish="length"))


class Servers:
    """An engine and its session: the judged arm answers as it is told to, the control arm rightly."""

    def __init__(self, judged: Callable[[int, Generate], AnyReply], stays: float = 0.0) -> None:
        self.judged, self.stays, self.asked, self.used = judged, stays, 0, 0.0

    def describe(self) -> Manifest:
        service = Service(token_ids=(0, 200), tokens_max=1024)
        names = {"ops": (), "shows": (), "promises": ("control",)}
        return Manifest(
            name="servers",
            version="1",
            axes=Axes(shards=(1,), page_sizes=(16,), layouts=("sharded",), fixed=CONFIG),
            service=service,
            **names,
        )

    def open(self, config: Config) -> Servers:
        assert CONFIG == config
        return self

    def apply(self, op: AnyOp) -> AnyReply:
        if not isinstance(op, Together):
            return Ok(Done())
        self.used = self.stays
        return Replies(tuple(self.answer(each) for each in op.ops if isinstance(each, Generate)))

    def answer(self, op: Generate) -> AnyReply:
        if op.arm:
            return Ok(right(op))
        self.asked += 1
        return self.judged(self.asked, op)

    def snapshot(self) -> Snapshot:
        return Snapshot((RankView(rank=0, counters={"num_used_tokens": self.used, "asked_total": self.asked}),))

    def close(self) -> None:
        pass


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], servers: Servers, *words: str
) -> tuple[int, dict[str, object], str]:
    monkeypatch.setattr(flood, "connect", lambda address: servers)
    code = flood.main(["http://x?control=http://y", "--rounds", "2", "--at-once", "20", *words])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


def sometimes(reply: Callable[[Generate], AnyReply]) -> Callable[[int, Generate], AnyReply]:
    """Every fifth request gets this, the others are right."""
    return lambda at, op: reply(op) if at % 5 == 0 else Ok(right(op))


class TestVerdicts:
    def test_right(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Answers of the control arm, and nothing left: 0."""
        code, said, _ = told(monkeypatch, capsys, Servers(lambda at, op: Ok(right(op))))

        assert (0, 40, 40, []) == (code, said["asked"], said["right"], said["amiss"])

    def test_wrong(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Another first token, or another log probability, is a wrong answer."""
        for tokens, score in (((99, 1, 2, 3), -0.5), (None, -0.9)):
            servers = Servers(sometimes(other(tokens, score)))
            code, said, _ = told(monkeypatch, capsys, servers)

            assert (1, 8) == (code, said["wrong"])

    def test_flips(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Other tokens behind the same ones are a tie, of which few are allowed."""

        def tie(op: Generate) -> AnyReply:
            return Ok(Generated(tokens=(*(right(op).tokens or ())[:2], 9, 9), logprobs=(-0.5,) * 4, finish="length"))

        flipped = Servers(sometimes(tie))
        code, said, _ = told(monkeypatch, capsys, flipped)
        more, _, _ = told(monkeypatch, capsys, flipped, "--flips", "0.3")

        assert (1, 8, ["8 flipped of 40, expected at most 0.02 of them"]) == (code, said["flipped"], said["amiss"])
        assert 0 == more

    def test_errors(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Errors are counted by their text without names, and allowed up to a share; none is then not enough."""
        failing = Servers(sometimes(lambda op: Refused(f"transfer of room {len(op.tokens)} failed")))
        code, said, out = told(monkeypatch, capsys, failing)
        allowed, _, _ = told(monkeypatch, capsys, failing, "--errors", "0.3")
        none, _, _ = told(monkeypatch, capsys, Servers(lambda at, op: Ok(right(op))), "--errors", "0.3")

        assert (1, 8, 0, 2) == (code, said["error"], allowed, none)
        assert "    8  error: transfer of room # failed" in out

    def test_lost(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """A request of which nobody knows how it ended is never allowed."""
        code, said, _ = told(monkeypatch, capsys, Servers(sometimes(lambda op: Unknown("time out"))), "--errors", "0.9")

        assert (1, 8, ["lost: time out"]) == (code, said["lost"], said["amiss"])

    def test_left(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """A level that does not come back is told; a counter may grow."""
        code, said, _ = told(monkeypatch, capsys, Servers(lambda at, op: Ok(right(op)), stays=64.0))

        assert (1, ["num_used_tokens of server rank 0 is 64.0, was 0.0"]) == (code, said["amiss"])


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Servers that are not there, and an engine that is no server."""
    assert [3, 3] == [flood.main([address]) for address in ("http://127.0.0.1:9?control=http://127.0.0.1:9", "ref")]
    assert 2 == capsys.readouterr().err.count("flood: ")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("", 0), ("runner.partial-page-not-persisted", 1)])
def test_real_servers(tmp_path: Path, fault: str, code: int) -> None:
    """The reference's pair answers a flood rightly; with rows that are not kept it does not."""
    asked = "{url:decode}?prefill={url:prefill}&control={url:control}&bootstrap={bootstrap_port:prefill}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "harness.cli", "up", "fixtures/topologies/p1d1_small.toml"),
            *("--log-dir", str(tmp_path), "--set", f"prefill.env.KVSHARD_FAULT='{fault}'", "--"),
            *(sys.executable, "-m", "ci.flood", asked, "--rounds", "2", "--at-once", "16"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert code == done.returncode, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (32, bool(fault)) == (said["asked"], bool(said["amiss"]))

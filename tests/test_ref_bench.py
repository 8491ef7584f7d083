"""The benchmark of the reference: that it works on CPUs, and that it sees wrong rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ci.register import register_cpu_ci
from harness.adapters import ref_bench
from harness.adapters.bench.content import fill
from harness.adapters.bench.figure import Check, Figure, Omitted, Overlap, merged
from harness.adapters.bench.gathers import GatherBench
from harness.adapters.bench.rank import Report
from harness.adapters.bench.sends import SendBench
from harness.adapters.bench.shape import CPU
from harness.adapters.bench.stopwatch import Stopwatch, Work
from harness.adapters.bench.tiers import TierBench
from harness.transports.peer_copy import Move, PageCopier
from kvshard_ref.device import HostDevice
from kvshard_ref.gather import PrefixGather
from kvshard_ref.group import SoloGroup
from kvshard_ref.host_pool import HostPool
from kvshard_ref.placement import Placement
from kvshard_ref.pool import ShardPool
from kvshard_ref.rows import RowBuffer

register_cpu_ci(est_time=25, stage="commit")

DEVICE = torch.device("cpu")
ROWS = ("gather, collective", "backup and restore", "send", "whole transfer")


class TestCommand:
    def test_two_processes(self, tmp_path: Path) -> None:
        """The command measures every part with two processes, says that CPUs tell nothing, and records all times."""
        record = tmp_path / "bench.jsonl"
        command = [sys.executable, "-m", "harness.adapters.ref_bench", "--group", "gloo", "--ranks", "2"]
        done = subprocess.run(
            [*command, "--repeats", "2", "--record", str(record)], capture_output=True, text=True, check=False
        )
        assert 0 == done.returncode, done.stderr
        assert "mean nothing" in done.stdout
        head, *findings = [json.loads(line) for line in record.read_text().splitlines()]
        assert (1, 2, ["CPU", "CPU"]) == (head["kvshard_bench"], head["ranks"], head["devices"])
        assert head["meaningless"]
        checks = [finding for finding in findings if finding["type"] == "Check"]
        assert all(check["equal"] for check in checks)
        assert all(any(check["name"].startswith(part) for check in checks) for part in ROWS)
        figures = [finding for finding in findings if finding["type"] == "Figure"]
        assert {2} == {len(figure[times]) for figure in figures for times in ("seconds", "raw_seconds")}
        assert ["gather, copies between GPUs"] == [one["name"] for one in findings if one["type"] == "Omitted"]

    def test_a_rank_that_ends(self, capfd: pytest.CaptureFixture[str]) -> None:
        """When a rank cannot start, the error names it and its code."""
        with pytest.raises(ref_bench.RankFailedError, match="rank 0 ended with code 1"):
            ref_bench.reports_of(1, "pigeons", ["host"], CPU)
        assert "pigeons" in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (["--ranks", "0"], "0 ranks"),
            (["--group", "nccl", "--ranks", "999"], "take --group gloo"),
            (["--ranks", "2", "--prefix-tokens", "12"], "12 prefix tokens, expected a multiple of 2 pages of 4"),
            (["--layers", "3"], "3 layers, expected at least 4"),
            (["--repeats", "0"], "0 repeats, expected at least 1"),
        ],
    )
    def test_options(self, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
        """An option that does not fit ends with code 2, the value and what was expected."""
        given = arguments if "--group" in arguments else ["--group", "gloo", *arguments]
        with pytest.raises(SystemExit) as caught:
            ref_bench.main(given)
        assert 2 == caught.value.code
        assert part in capsys.readouterr().err

    def test_wrong_rows_are_told(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Rows that are wrong on any rank are in the table, and the exit code is 1."""
        reports = [Report("CPU", {}, [Check("gather, rows", equal)]) for equal in (True, False)]
        monkeypatch.setattr(ref_bench, "reports_of", lambda *_: reports)
        assert 1 == ref_bench.main(["--group", "gloo"])
        assert "WRONG ROWS" in capsys.readouterr().out


class TestFigures:
    def test_ratio_and_rates(self) -> None:
        """The ratio is that of the medians; rates are of the slowest, the median and the fastest repeat."""
        figure = Figure("a", "b", 10**9, [2.0, 1.0, 4.0], [1.0, 1.0, 0.5])
        assert 0.5 == figure.ratio
        assert [(0.25, 0.5, 1.0), (1.0, 1.0, 2.0)] == figure.rates()

    def test_hidden(self) -> None:
        """Nothing is hidden when the two take as long as one after the other, all when the gather costs no time."""
        assert 0.0 == Overlap("a", [1.0], [4.0], [5.0]).hidden
        assert 0.75 == Overlap("a", [1.0], [4.0], [4.25]).hidden

    def test_merged(self) -> None:
        """A repeat takes as long as the slowest rank, and one rank's wrong rows are everybody's."""
        figures = [Figure("a", "b", 1, [1.0, 5.0], [2.0, 2.0]), Figure("a", "b", 1, [3.0, 4.0], [1.0, 3.0])]
        assert Figure("a", "b", 1, [3.0, 5.0], [2.0, 3.0]) == merged(figures)
        overlaps = [Overlap("a", [1.0], [2.0], [3.0]), Overlap("a", [2.0], [1.0], [1.0])]
        assert Overlap("a", [2.0], [2.0], [3.0]) == merged(overlaps)
        assert Check("a", equal=False) == merged([Check("a", equal=True), Check("a", equal=False)])
        assert Omitted("a", "why") == merged([Omitted("a", "why")])

    def test_works_are_taken_in_turn(self) -> None:
        """Each repeat takes every work once, prepared before, and the warm-up is left out."""
        calls: list[str] = []
        works = [
            Work(lambda: calls.append("one"), lambda: calls.append("prepare")),
            Work(lambda: calls.append("two")),
        ]
        times = Stopwatch(DEVICE, lambda: calls.append("meet")).compare(works, repeats=2, warmup=1)
        assert ["prepare", "meet", "one", "meet", "two"] * 3 == calls
        assert [2, 2] == [len(taken) for taken in times]


def solo_pool() -> ShardPool:
    pool = ShardPool(0, Placement(1, CPU.page_size), 2 * CPU.pages, CPU.layers, (CPU.component,))
    fill(pool, seed=1)
    return pool


def gathers() -> list[Check]:
    bench = GatherBench(CPU, solo_pool(), Stopwatch(DEVICE), HostDevice())
    gather = PrefixGather(bench._pool, SoloGroup(), bench._scratch, "tight", HostDevice())
    return [Check("gather", bench._right(gather))]


def tiers() -> list[Check]:
    found = TierBench(CPU, solo_pool(), Stopwatch(DEVICE), HostDevice()).findings()
    return [finding for finding in found if isinstance(finding, Check)]


def sends() -> list[Check]:
    found = SendBench(CPU, (DEVICE, DEVICE), Stopwatch(DEVICE), HostDevice()).findings()
    return [finding for finding in found if isinstance(finding, Check)]


class TestChecks:
    @pytest.mark.parametrize("part", [gathers, tiers, sends])
    def test_right_rows(self, part: Callable[[], list[Check]]) -> None:
        """What the reference moves is found equal."""
        assert {True} == {check.equal for check in part()}

    def test_a_page_that_is_not_gathered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One page that a gather leaves out is seen."""
        take = RowBuffer.take_pages

        def short(rows: RowBuffer, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return take(rows, pages[:-1], out[:-1])

        monkeypatch.setattr(RowBuffer, "take_pages", short)
        assert {False} == {check.equal for check in gathers()}

    def test_a_page_that_is_not_restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One page that a restore leaves out is seen."""
        put = RowBuffer.put_pages
        monkeypatch.setattr(RowBuffer, "put_pages", lambda rows, pages, values: put(rows, pages[:-1], values[:-1]))
        assert {False} == {check.equal for check in tiers()}

    def test_a_backup_that_does_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows of an earlier backup do not pass for those of this one."""
        own = HostPool._own
        monkeypatch.setattr(HostPool, "backup", lambda host, copies: (own(host, copies), HostDevice.Event())[1])
        assert {False} == {check.equal for check in tiers()}

    def test_a_page_that_is_not_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The last page of a write, left out, is missed."""
        copy = PageCopier.copy

        def short(copier: PageCopier, move: Move) -> object:
            spans = move.spans.copy()
            spans[2, -1] -= 1
            return copy(copier, move._replace(spans=spans if spans[2, -1] else spans[:, :-1]))

        monkeypatch.setattr(PageCopier, "copy", short)
        assert {False} == {check.equal for check in sends()}

    def test_a_page_too_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A page of the target that nobody sent anything to must stay as it was."""
        copy = PageCopier.copy

        def spill(copier: PageCopier, move: Move) -> object:
            move.target[0] = move.source[1]
            return copy(copier, move)

        monkeypatch.setattr(PageCopier, "copy", spill)
        assert {False} == {check.equal for check in sends()}

"""The index benchmark: its workload, its check that the work is the same, its ratios, and the command."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.adapters.ref_index import RefIndexEngine, RefIndexParts, index_engine
from harness.bench_index import (
    CYCLE,
    FIGURES,
    PARTS,
    Hits,
    IndexParts,
    Ratio,
    Workload,
    measure,
    run_once,
    run_worker,
    tokens_of,
)
from harness.capacity import CapacityError
from harness.cli import main
from harness.usage import UserError
from kvshard_ref.placement import Placement
from kvshard_ref.radix import RadixTree

register_cpu_ci(est_time=10, stage="commit")

SMALL = Workload(shards=2, page_size=4, requests=30, prompt_tokens=33, pages_per_rank=20, rounds=3)
FEW = ["--requests", "12", "--prompt", "130", "--page-size", "16", "--pages", "20", "--rounds", "3"]
LIKE = "ref?like=sglang"


def test_prompts_are_seeded_and_share_prefixes() -> None:
    """A seed gives the same prompts again, of whole pages only; some begin as an earlier one does, none is all new."""
    prompts = SMALL.prompts()
    assert prompts == SMALL.prompts()
    assert prompts != Workload(requests=30, prompt_tokens=33, page_size=4, seed=1).prompts()
    assert {len(keys) for keys in prompts} == {33 // 4}
    again = [number for number, keys in enumerate(prompts) if keys[0] in {earlier[0] for earlier in prompts[:number]}]
    assert 0 < len(again) < len(prompts) - 1


def test_hits_and_evictions_by_hand() -> None:
    """Of two equal prompts of two pages the second hits one page: the last token is computed. Two more pages evict."""
    workload = Workload(shards=1, page_size=4, requests=4, prompt_tokens=8, pages_per_rank=8, rounds=3)
    prompts = [tokens_of(keys, 8, 4) for keys in ([0, 1], [0, 1], [2, 3], [4, 5], [6, 7], [8, 9])]
    seen: Hits = [(0, 0), (4, 0), (0, 0), (0, 0), (0, 0), (0, 2)]
    worker: Hits = [*seen[:4], (0, 1), (0, 3)]  # asks for a page more: the leaf [1], then [0] and the leaf [2, 3]
    assert run_once(workload, RefIndexEngine(like="sglang"), prompts)[1] == (seen, worker)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_own_rules_and_others_agree_without_pressure(shards: int, page_size: int) -> None:
    """Where nothing is evicted the reference hits the same by its own rules and by those of the other engine."""
    workload = Workload(
        shards=shards, page_size=page_size, requests=20, prompt_tokens=48, pages_per_rank=1000, rounds=3
    )
    _, (parts, worker) = measure(workload, [index_engine({}), index_engine({"like": "sglang"})])
    assert parts == worker
    assert sum(hit for hit, _ in parts) > 0
    assert [evicted for _, evicted in parts] == [0] * 20


def test_a_split_renews_only_by_the_other_rules() -> None:
    """A prompt shares half of the oldest chain; then a leaf must go: what is left of that chain, or the next one."""

    def hits(like: str) -> list[int]:
        cache = RefIndexEngine(like=like).cache(1, 4, 14)
        for number, keys in enumerate(([0, 1, 2, 3], [10, 11, 12, 13], [0, 1, 30, 31], [40, 41], [50, 51, 52, 53])):
            cache.open(number, keys, 4 * len(keys), 4 * len(keys))
            cache.extend(number)
            cache.finish(number)
        return [cache.open(9 + first, list(range(first, first + 4)), 16, 16) for first in (0, 10)]

    assert (hits("ref"), hits("sglang")) == ([8, 12], [12, 0])


class Recorded(RefIndexEngine):
    """Notes when it runs."""

    __slots__ = ()
    runs: list[str] = []  # noqa: RUF012  # of each test, see `recorded`

    def parts(self, shards: int, page_size: int, pages_per_rank: int) -> IndexParts:
        self.runs.append(self.name)
        return RefIndexEngine.parts(self, shards, page_size, pages_per_rank)


class BoastingParts(RefIndexParts):
    """Says that it found a token more than it did."""

    def match(self, keys: Sequence[Hashable], tokens: int) -> int:
        return super().match(keys, tokens) + 1


class Boasting(RefIndexEngine):
    __slots__ = ()

    def parts(self, shards: int, page_size: int, pages_per_rank: int) -> IndexParts:
        return BoastingParts(RadixTree(Placement(shards, page_size)), pages_per_rank)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    runs: list[str] = []
    monkeypatch.setattr(Recorded, "runs", runs)
    return runs


def test_engines_take_turns(recorded: list[str]) -> None:
    """Each round runs every engine once, and each begins every other round; one round more warms up."""
    times, _ = measure(SMALL, [Recorded("a"), Recorded("b")])
    assert recorded == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [(each.engine, sorted(each.seconds)) for each in times] == [(name, sorted(FIGURES)) for name in ("a", "b")]
    assert {len(rounds) for each in times for rounds in each.seconds.values()} == {3}
    for each in times:
        sums = [sum(parts) for parts in zip(*(each.seconds[part] for part in PARTS), strict=True)]
        assert each.seconds[CYCLE] == pytest.approx(sums)


def test_different_work_is_not_compared() -> None:
    """Engines that hit otherwise get no ratio but an error with the first request that differs."""
    with pytest.raises(CapacityError, match=r"b hit 1 tokens and evicted 0 pages at request 0; expected 0 and 0"):
        measure(SMALL, [RefIndexEngine("a"), Boasting("b")])


def test_ratio_by_hand() -> None:
    """The quartiles are of the ratio round by round, not of the times; where the first took no time there is none."""
    assert Ratio.of([1.0, 1.0, 2.0], [2.0, 4.0, 4.0]) == Ratio(low=2.0, median=2.0, high=3.0)
    assert Ratio.of([0.0, 1.0, 1.0], [1.0, 1.0, 1.0]) is None


def test_report_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a row per figure and fits 80 columns; JSON has every round, Markdown the same rows."""
    files = ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    assert main(["bench", "index", *FEW, "--pages", "200", "--engines", f"ref,{LIKE}", *files]) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    rows = [line.split("|")[1].strip() for line in (tmp_path / "r.md").read_text().splitlines() if line[:1] == "|"]
    assert [each["engine"] for each in report["times"]] == ["ref", "ref like sglang"]
    assert [len(each["seconds"][CYCLE]) for each in report["times"]] == [3, 3]
    assert sorted(report["ratios"]["ref like sglang"]) == sorted(FIGURES)
    assert rows[2:] == list(FIGURES)
    assert [line.split()[0] for line in shown.splitlines() if line[1:].startswith(FIGURES)] == list(FIGURES)
    assert max(len(line) for line in shown.splitlines() if line.startswith(" ")) <= 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.md"]


def test_an_engine_that_is_not_here_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default it is left out, with the command that installs it; one that was asked for is an error."""

    def absent() -> str:
        raise UserError("sglang is not installed")

    monkeypatch.setattr("harness.adapters.sglang_index.installed", absent)
    assert main(["bench", "index", *FEW]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("not measured: sglang is not installed; in a clone of kvshard: bash ci/install_sglang.sh") == 1
    assert main(["bench", "index", *FEW, "--engines", "sglang"]) == 3
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith("kvshard bench index: sglang is not installed; in a clone of kvshard: bash ci/install")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--rounds", "2"], "rounds is 2; expected at least 3"),
        (["--requests", "0"], "--requests '0': expected a whole number of at least 1"),
        (["--prompt", "8"], "prompt_tokens is 8; expected at least 16"),
        (["--pages", "5"], "pages per rank is 5; expected at least 10 for a prompt of 9 pages on 4 ranks"),
        (["--seed", "-1"], "--seed '-1': expected a whole number of at least 0"),
        (["--engines", "rf"], "engine 'rf'; did you mean 'ref'? Expected one of ref, sglang"),
        (["--engines", "ref,ref"], "--engines 'ref,ref': an engine is named twice"),
        (["--engines", "ref?like=none"], "option like='none' of engine ref; expected one of ref, sglang"),
        (["--engines", "ref?shards=2"], "option 'shards' of engine ref; expected like"),
        (["--engines", "sglang?tree=c"], "option tree='c' of engine sglang; expected one of python, rust"),
        (["--engines", "py:a:b"], "engine 'a'. Expected one of ref, sglang"),
        (["--json", "absent/r.json"], "--json 'absent/r.json': expected a regular file in a folder that exists"),
    ],
)
def test_bad_input_is_one_line(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad option is exit code 3 and one line that says what was expected; no table."""
    assert main(["bench", "index", *FEW, *options]) == 3
    shown = capsys.readouterr()
    assert shown.err.startswith("kvshard bench index: ")
    assert reason in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_a_prompt_in_tokens_is_one_for_one() -> None:
    """Different page keys, those of fresh pages too, give pages without a common token, and none is negative."""
    tokens = tokens_of([0, 1, -1, -2, 5], 22, 4)
    assert len(tokens) == 22
    assert len(set(tokens[:20])) == 20
    assert min(tokens) >= 0


def test_table_of_one_engine_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    """An engine by itself is measured too."""
    assert main(["bench", "index", *FEW, "--engines", "ref"]) == 0
    assert "times the" not in capsys.readouterr().out


def test_capacity_through_two_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvshard capacity` shows the tables of each engine, then the other one beside the first; JSON has both grids."""
    small = ["--generate", "30", "--shards", "2", "--memory-per-rank", "2GiB"]
    assert main(["capacity", *small, "--engine", f"ref,{LIKE}", "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert [each["engine"] for each in (report, *report["others"])] == ["ref", "ref like sglang"]
    assert [len(each["rows"]) for each in (report, *report["others"])] == [2, 2]
    shown = capsys.readouterr().out
    assert shown.count("compared with ref, on the same requests") == 1
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--engine", "rf"], "engine 'rf'; did you mean 'ref'? Expected one of ref, sglang"),
        (["--engine", ""], "engine '' is no address; expected"),
        (["--engine", "ref,ref", "--jobs", "2"], "--jobs '2' with several engines: their times are compared"),
        (["--engine", "ref,ref", "--plot", "r.png"], "--plot 'r.png' with several engines: it shows one"),
    ],
)
def test_bad_engine_of_capacity_is_one_line(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that does not exist, or options that do not go with several, are exit code 3 and one line."""
    assert main(["capacity", *options]) == 3
    shown = capsys.readouterr()
    assert shown.err.startswith("kvshard capacity: ")
    assert reason in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_what_is_not_admitted_is_told() -> None:
    """A worker that refuses a request of the workload ends the measurement with the reason."""
    workload = Workload(shards=1, page_size=4, requests=1, prompt_tokens=8, pages_per_rank=8, rounds=3)
    with pytest.raises(CapacityError, match="ref does not admit request 0: "):
        run_worker(workload, RefIndexEngine(), RefIndexEngine().cache(1, 4, 1), [tokens_of([0, 1], 8, 4)])

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from ci.register import register_cpu_ci
from harness.lockstep import CollectiveMismatch, Lockstep, LockstepGroup

register_cpu_ci(est_time=10, stage="commit")


@pytest.fixture
def pair() -> Iterator[Lockstep]:
    with Lockstep(2) as lockstep:
        yield lockstep


def gather(group: LockstepGroup, *rows: int) -> list[int]:
    part = torch.tensor(rows, dtype=torch.int64)
    out = torch.zeros(len(rows) * group.size, dtype=torch.int64)
    group.all_gather(out, part)
    return out.tolist()


def mismatch_of(lockstep: Lockstep, program: object) -> CollectiveMismatch:
    with pytest.raises(CollectiveMismatch) as caught:
        lockstep.run(program)  # type: ignore[arg-type]  # takes any number of arguments
    return caught.value


class TestOrder:
    def test_rounds(self) -> None:
        """Rank 0 runs until its collective, then rank 1, then rank 2, and every round is in that order again."""
        events: list[tuple[int, str]] = []

        def program(rank: int, group: LockstepGroup) -> None:
            for step in ("a", "b"):
                events.append((rank, step))
                group.minimum([rank])
            events.append((rank, "end"))

        with Lockstep(3) as lockstep:
            lockstep.run(program)
        assert [(rank, step) for step in ("a", "b", "end") for rank in range(3)] == events

    def test_one_at_a_time(self) -> None:
        """Two ranks never run at once, so unlocked shared state is safe between collectives."""
        inside = [0]
        seen = []

        def program(_: int, group: LockstepGroup) -> None:
            for _ in range(20):
                inside[0] += 1
                seen.append(inside[0])
                sum(range(2000))
                inside[0] -= 1
                group.minimum([0])

        with Lockstep(4) as lockstep:
            lockstep.run(program)
        assert [1] * 80 == seen

    def test_results(self, pair: Lockstep) -> None:
        """run() returns what each rank's program returned, by rank."""
        assert [0, 10] == pair.run(lambda rank, _: rank * 10)

    def test_one_rank(self) -> None:
        """A group of one rank gathers its own part."""
        with Lockstep(1) as lockstep:
            assert [[5, 6]] == lockstep.run(lambda _, group: gather(group, 5, 6))


class TestCollectives:
    def test_gather_by_rank(self) -> None:
        """Every rank gets the parts of all ranks in rank order."""
        with Lockstep(3) as lockstep:
            assert [[0, 1, 10, 11, 20, 21]] * 3 == lockstep.run(lambda r, group: gather(group, 10 * r, 10 * r + 1))

    def test_gather_own_block(self, pair: Lockstep) -> None:
        """The part may be the rank's own block of its output."""

        def program(rank: int, group: LockstepGroup) -> list[list[int]]:
            out = torch.full((4, 2), -1)
            out[2 * rank : 2 * rank + 2] = rank
            group.all_gather(out, out[2 * rank : 2 * rank + 2])
            return out.tolist()

        assert [[[0, 0], [0, 0], [1, 1], [1, 1]]] * 2 == pair.run(program)

    def test_gather_empty(self, pair: Lockstep) -> None:
        """Ranks with nothing to give still join, and nothing is written."""
        assert [[], []] == pair.run(lambda _, group: gather(group))

    def test_gather_is_a_copy(self, pair: Lockstep) -> None:
        """What a rank does to its part later does not reach its peers."""

        def program(rank: int, group: LockstepGroup) -> list[int]:
            part, out = torch.tensor([rank]), torch.zeros(2, dtype=torch.int64)
            group.all_gather(out, part)
            part.fill_(99)
            group.minimum([0])
            return out.tolist()

        assert [[0, 1], [0, 1]] == pair.run(program)

    def test_minimum(self) -> None:
        """minimum is elementwise, and each rank owns its answer."""
        answers = [[3, 9, 1], [2, 9, 4], [8, 9, 0]]

        def program(rank: int, group: LockstepGroup) -> list[int]:
            lowest = group.minimum(answers[rank])
            lowest.append(rank)
            return lowest

        with Lockstep(3) as lockstep:
            assert [[2, 9, 0, rank] for rank in range(3)] == lockstep.run(program)

    def test_meet(self, pair: Lockstep) -> None:
        """A collective of one's own is completed once, over the payloads in rank order; all ranks get its result."""
        calls = []

        def complete(payloads: list[str]) -> str:
            calls.append(payloads)
            return "".join(payloads)

        assert ["ab", "ab"] == pair.run(lambda r, group: group.meet("join", (), "ab"[r], complete))
        assert [["a", "b"]] == calls

    def test_log(self, pair: Lockstep) -> None:
        """The log of each rank holds one entry per collective, over all runs, until its owner clears it."""

        def program(_: int, group: LockstepGroup) -> None:
            group.all_gather(torch.zeros(4, 2, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16))
            group.minimum([1, 2, 3])

        pair.run(program)
        pair.run(lambda _, group: group.minimum([1]))
        assert [["all_gather bfloat16[4,2]", "minimum int64[3]", "minimum int64[1]"]] * 2 == [
            group.log for group in pair.groups
        ]

    @pytest.mark.parametrize("inference", [False, True])
    def test_modes_of_the_caller(self, pair: Lockstep, *, inference: bool) -> None:
        """Ranks run in the caller's inference and grad mode, and gather what these modes make."""

        def program(rank: int, group: LockstepGroup) -> tuple[bool, bool, list[int]]:
            return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), gather(group, rank)

        with torch.inference_mode(inference):
            assert [(inference, not inference, [0, 1])] * 2 == pair.run(program)

    def test_modes_of_ranks(self, pair: Lockstep) -> None:
        """Inference tensors of one rank and normal tensors of another gather together."""

        def program(rank: int, group: LockstepGroup) -> list[int]:
            with torch.inference_mode(rank == 0):
                return gather(group, rank)

        assert [[0, 1], [0, 1]] == pair.run(program)

    def test_intraop_threads(self, pair: Lockstep) -> None:
        """Ranks compute with one thread each; the caller and threads to come keep the caller's number."""
        before = torch.get_num_threads()
        later: list[int] = []
        assert [1, 1] == pair.run(lambda *_: torch.get_num_threads())
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert [before, before] == [torch.get_num_threads(), *later]


class TestMismatch:
    def test_shape(self, pair: Lockstep) -> None:
        """Differing shapes name the collective, both ranks, both shapes and both call sites."""

        def program(rank: int, group: LockstepGroup) -> None:
            group.minimum([0])
            if rank == 0:
                gather(group, 1, 2)
            else:
                group.all_gather(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

        error = mismatch_of(pair, program)
        assert 1 == error.index
        first = gather.__code__.co_firstlineno
        second = program.__code__.co_firstlineno
        assert error.sides == [
            f"all_gather out torch.int64 (4,) part torch.int64 (2,) at tests/test_lockstep.py:{first + 3}",
            f"all_gather out torch.int64 (2,) part torch.int64 (1,) at tests/test_lockstep.py:{second + 5}",
        ]
        assert (
            f"collective #1 of the run differs within the shard group of 2 ranks; real ranks would hang here\n"
            f"  ranks 0: {error.sides[0]}\n  ranks 1: {error.sides[1]}\n"
            "Make every rank issue the same collectives with the same shapes and dtypes, also one with nothing to do."
        ) == str(error)

    def test_part_alone(self, pair: Lockstep) -> None:
        """A peer with equal outputs and a smaller part is a mismatch, never a silent broadcast."""

        def program(rank: int, group: LockstepGroup) -> None:
            group.all_gather(torch.zeros(4, 2), torch.zeros(2 - rank, 2))

        error = mismatch_of(pair, program)
        assert ["part torch.float32 (2, 2)", "part torch.float32 (1, 2)"] == [
            side[side.index("part") : side.index(" at ")] for side in error.sides
        ]

    def test_dtype(self, pair: Lockstep) -> None:
        """Differing dtypes are a mismatch."""
        dtypes = [torch.int64, torch.int32]
        error = mismatch_of(
            pair, lambda r, group: group.all_gather(torch.zeros(2, dtype=dtypes[r]), torch.zeros(1, dtype=dtypes[r]))
        )
        assert [True, True] == [str(dtypes[rank]) in error.sides[rank] for rank in range(2)]

    def test_kind(self, pair: Lockstep) -> None:
        """Differing kinds are a mismatch that names both."""
        error = mismatch_of(pair, lambda r, group: gather(group, 1) if r else group.minimum([4, 4]))
        assert ["minimum values 2", "all_gather out"] == [
            " ".join(side.split()[: 3 - r]) for r, side in enumerate(error.sides)
        ]

    def test_kind_alone(self, pair: Lockstep) -> None:
        """Two kinds of one signature are a mismatch too."""
        error = mismatch_of(pair, lambda r, group: group.meet(("send", "receive")[r], ("rows", 3), None, len))
        assert ["send rows 3", "receive rows 3"] == [side.partition(" at ")[0] for side in error.sides]

    def test_missing_peer(self) -> None:
        """A rank that skips one collective is named by what it did instead, ranks that agree are listed together."""

        def program(rank: int, group: LockstepGroup) -> None:
            if rank != 1:
                gather(group, rank)
            group.minimum([rank])

        with Lockstep(3) as lockstep:
            error = mismatch_of(lockstep, program)
        assert ["all_gather", "minimum", "all_gather"] == [side.split()[0] for side in error.sides]
        assert "  ranks 0, 2: all_gather" in str(error)

    def test_ended_rank(self, pair: Lockstep) -> None:
        """A rank that ended while a peer waits is named with the collectives it made."""

        def program(rank: int, group: LockstepGroup) -> None:
            for _ in range(3 if rank else 2):
                group.minimum([0])

        error = mismatch_of(pair, program)
        assert "ended its program after 2 collectives" == error.sides[0]
        assert error.sides[1].startswith("minimum values 1 at tests/test_lockstep.py:")

    def test_raising_rank(self, pair: Lockstep) -> None:
        """A rank that raised while a peer waits is named with its error and line, and the error is the cause."""

        def program(rank: int, group: LockstepGroup) -> None:
            if rank:
                raise KeyError("page 7")
            group.minimum([0])

        error = mismatch_of(pair, program)
        line = program.__code__.co_firstlineno + 2
        assert f"raised KeyError: 'page 7' at tests/test_lockstep.py:{line}" == error.sides[1]
        assert KeyError is type(error.__cause__)

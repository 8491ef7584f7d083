from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from ci.register import register_cpu_ci
from harness.lockstep import CollectiveMismatch, Lockstep, LockstepGroup, LockstepMisuseError, RankStuck

register_cpu_ci(est_time=10, stage="commit")


@pytest.fixture
def pair() -> Iterator[Lockstep]:
    with Lockstep(2) as lockstep:
        yield lockstep


def gather(rank: int, group: LockstepGroup) -> list[int]:
    out = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(out, torch.tensor([rank]))
    return out.tolist()


def mismatch(rank: int, group: LockstepGroup) -> None:
    group.minimum([0] * (rank + 1))


def rank_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lockstep rank")}


class TestErrors:
    def test_lowest_rank(self) -> None:
        """When nobody waits, the exception of the lowest raising rank comes out of run()."""

        def program(rank: int, group: LockstepGroup) -> None:
            group.minimum([0])
            if rank:
                raise KeyError(rank)

        with Lockstep(3) as lockstep, pytest.raises(KeyError) as caught:
            lockstep.run(program)
        assert (1,) == caught.value.args

    def test_skip_passes_through(self, pair: Lockstep) -> None:
        """A skip, or another exception that is no Exception, is never turned into a finding."""

        def program(rank: int, group: LockstepGroup) -> None:
            if rank:
                pytest.skip("not here")
            group.minimum([0])

        with pytest.raises(pytest.skip.Exception, match="not here"):
            pair.run(program)

    def test_unwinding(self, pair: Lockstep) -> None:
        """Ranks that wait unwind through their finally blocks, in rank order, and `except Exception` keeps none."""
        events: list[str] = []

        def program(rank: int, group: LockstepGroup) -> None:
            try:
                group.minimum([0] * (rank + 1))
            except Exception:  # noqa: BLE001 - a program that swallows everything
                events.append(f"caught {rank}")
            finally:
                events.append(f"left {rank}")

        with pytest.raises(CollectiveMismatch):
            pair.run(program)
        assert ["left 0", "left 1"] == events

    def test_collective_while_unwinding(self, pair: Lockstep) -> None:
        """A collective in a finally block of an unwinding rank does not hang."""

        def program(rank: int, group: LockstepGroup) -> None:
            try:
                group.minimum([0] * (rank + 1))
            finally:
                group.minimum([0])

        with pytest.raises(CollectiveMismatch, match="collective #0"):
            pair.run(program)

    def test_reuse(self, pair: Lockstep) -> None:
        """After a mismatch and after an exception the same object, with the same threads, runs again."""
        with pytest.raises(CollectiveMismatch):
            pair.run(mismatch)
        with pytest.raises(ZeroDivisionError):
            pair.run(lambda *_: 1 // 0)
        assert [[0, 1], [0, 1]] == pair.run(gather)

    def test_bad_shapes_everywhere(self, pair: Lockstep) -> None:
        """Shapes that all ranks share but no gather can serve are a misuse that names the collective."""
        with pytest.raises(
            LockstepMisuseError, match=r"all_gather on rank 0 of 2: out float32\[3\], part float32\[1\]"
        ) as error:
            pair.run(lambda _, group: group.all_gather(torch.zeros(3), torch.zeros(1)))
        assert error.value.__notes__[0].startswith("in collective #0 of the run: all_gather out torch.float32 (3,)")

    def test_foreign_overlap(self, pair: Lockstep) -> None:
        """A part that is another rank's block of the output is a misuse: the gather would overwrite what it sends."""

        def program(rank: int, group: LockstepGroup) -> None:
            out = torch.zeros(2)
            group.all_gather(out, out[1 - rank : 2 - rank])

        with pytest.raises(
            LockstepMisuseError, match="part overlaps out from byte 4; only this rank's own block, at byte 0"
        ):
            pair.run(program)

    def test_strided(self, pair: Lockstep) -> None:
        """Tensors that are not contiguous are refused as a real group refuses them."""
        with pytest.raises(LockstepMisuseError, match="both must be contiguous"):
            pair.run(lambda _, group: group.all_gather(torch.zeros(2, 4).T, torch.zeros(2, 2)))

    @pytest.mark.parametrize("interrupts", [1, 2])
    def test_interrupt(self, monkeypatch: pytest.MonkeyPatch, interrupts: int) -> None:
        """One interrupt of the caller unwinds the ranks and leaves the object usable; after two it only closes."""
        outside = rank_threads()
        left = list(range(interrupts))

        class Interrupted(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                if left:
                    left.pop()
                    raise KeyboardInterrupt
                return super().wait(timeout)

        def program(_: int, group: LockstepGroup) -> None:
            while True:
                group.minimum([0])

        with Lockstep(2) as lockstep:
            lockstep.run(gather)
            monkeypatch.setattr("harness.ring.threading.Event", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                lockstep.run(program)
            monkeypatch.undo()
            if interrupts == 1:
                assert [[0, 1], [0, 1]] == lockstep.run(gather)
            else:
                with pytest.raises(LockstepMisuseError, match=r"run\(\) after close\(\), or after two interrupts"):
                    lockstep.run(gather)
        assert outside == rank_threads()

    def test_group_outside_run(self, pair: Lockstep) -> None:
        """A collective outside run() is a misuse, not a hang."""
        with pytest.raises(LockstepMisuseError, match="the group of rank 0 was used by thread 'MainThread'"):
            pair.groups[0].minimum([1])

    def test_group_of_another_rank(self, pair: Lockstep) -> None:
        """A rank that uses its peer's group is told so."""
        with pytest.raises(LockstepMisuseError, match="the group of rank 1 was used by thread 'lockstep rank 0'"):
            pair.run(lambda rank, _: pair.groups[1 - rank].minimum([1]))

    def test_nested_run(self, pair: Lockstep) -> None:
        """run() within a run of the same object is a misuse, not a deadlock."""
        with pytest.raises(LockstepMisuseError, match="while a run of this Lockstep is active"):
            pair.run(lambda *_: pair.run(lambda *_: None))

    def test_no_ranks(self) -> None:
        """A shard group without a rank is refused with the number given."""
        with pytest.raises(LockstepMisuseError, match=r"Lockstep\(ranks=0\)"):
            Lockstep(0)


class TestLifetime:
    def test_two_objects(self, pair: Lockstep) -> None:
        """Two objects, one used from within the ranks of the other, do not disturb each other."""
        with Lockstep(3) as inner:

            def program(rank: int, group: LockstepGroup) -> tuple[list[int], list[list[int]]]:
                return gather(rank, group), inner.run(lambda r, g: gather(10 * rank + r, g))

            assert [([0, 1], [[0, 1, 2]] * 3), ([0, 1], [[10, 11, 12]] * 3)] == pair.run(program)
            with pytest.raises(CollectiveMismatch):
                inner.run(mismatch)
            assert [0, 1] == pair.run(lambda r, _: r)

    def test_lazy_threads(self) -> None:
        """No thread exists before the first run; all runs share the same threads; none is left after close()."""
        outside = rank_threads()
        lockstep = Lockstep(2)
        assert outside == rank_threads()
        idents = [lockstep.run(lambda *_: threading.get_ident()) for _ in range(2)]
        assert idents[0] == idents[1]
        assert ["lockstep rank 0", "lockstep rank 1"] == sorted(thread.name for thread in rank_threads() - outside)
        lockstep.close()
        assert outside == rank_threads()

    def test_keeps_no_tensor(self, pair: Lockstep) -> None:
        """After a run, good or bad, the object keeps none of its tensors alive."""
        parts: list[weakref.ref[torch.Tensor]] = []

        def gather_rows(rows: int, group: LockstepGroup) -> torch.Tensor:
            part = torch.zeros(rows)
            parts.append(weakref.ref(part))
            group.all_gather(torch.zeros(2 * rows), part)
            return part

        pair.run(lambda _, group: gather_rows(3, group))
        with pytest.raises(CollectiveMismatch):
            pair.run(lambda rank, group: gather_rows(rank + 1, group))
        gc.collect()
        assert [None] * 4 == [part() for part in parts]

    def test_close_after_error(self) -> None:
        """close() leaves no thread after a mismatch, and may be called again."""
        outside = rank_threads()
        lockstep = Lockstep(2)
        with pytest.raises(CollectiveMismatch):
            lockstep.run(mismatch)
        lockstep.close()
        lockstep.close()
        assert outside == rank_threads()

    def test_close_during_run(self) -> None:
        """close() from another thread cuts an active run short at its next collective."""
        outside = rank_threads()
        lockstep = Lockstep(2)
        running = threading.Event()

        def program(_: int, group: LockstepGroup) -> None:
            while True:
                running.set()
                group.minimum([0])

        def close() -> None:
            running.wait()
            lockstep.close()

        closer = threading.Thread(target=close)
        closer.start()
        with pytest.raises(LockstepMisuseError, match="cut short"):
            lockstep.run(program)
        closer.join()
        assert outside == rank_threads()

    def test_run_after_close(self) -> None:
        """run() after close() is a misuse that says so."""
        lockstep = Lockstep(2)
        lockstep.close()
        with pytest.raises(LockstepMisuseError, match=r"run\(\) after close\(\), or after two interrupts"):
            lockstep.run(lambda *_: None)

    def test_close_by_a_rank(self, pair: Lockstep) -> None:
        """A rank that closes its own object is told to do so outside."""
        with pytest.raises(LockstepMisuseError, match="called by a rank"):
            pair.run(lambda *_: pair.close())


def test_a_stuck_rank_is_named_and_the_next_run_works() -> None:
    """A rank that loops for ever is a RankStuck with its place; all ranks unwind, and the object stays usable."""

    def program(rank: int, group: LockstepGroup) -> list[int]:
        while rank == 1:
            pass
        return group.minimum([rank])

    with Lockstep(3) as lockstep:
        with pytest.raises(RankStuck, match=r"rank 1 of 3 still runs after 0.2 s, at .*test_lockstep_errors.py:\d+"):
            lockstep.run(program, seconds_max=0.2)
        assert lockstep.usable
        assert lockstep.run(lambda rank, group: group.minimum([rank]), seconds_max=5.0) == [[0]] * 3


def test_a_rank_stuck_outside_of_python_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that no exception reaches is left behind: run and close return, and the object is at its end."""
    monkeypatch.setattr("harness.ring.UNWIND_SECONDS", 0.1)
    release = threading.Lock()
    release.acquire()
    lockstep = Lockstep(2)

    def program(rank: int, group: LockstepGroup) -> None:
        if rank == 0:
            release.acquire()

    with pytest.raises(RankStuck, match="rank 0 of 2 still runs"):
        lockstep.run(program, seconds_max=0.1)
    lockstep.close()
    assert not lockstep.usable
    release.release()

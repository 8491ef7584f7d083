from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ci.register import register_cpu_ci
from harness.sim import access, cells
from harness.sim.access import CHOSEN, Access, Operations, read
from harness.sim.cells import Block, Cells, Runs
from harness.sim.race import UnknownOp

register_cpu_ci(est_time=10, stage="commit")

ITEM = 8  # bytes of the elements here, int64 and float64


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's has no annotations
        self.operations = Operations()
        self.seen: list[Access] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen += self.operations.accesses(func, args, kwargs or {}, result)
        return result


def elements(found: Cells, item: int = ITEM) -> set[int]:
    """The elements of a storage that cells cover; a cell is made of whole elements."""
    starts = [found.start] if isinstance(found, Block) else found.starts.tolist()
    assert [0] * (len(starts) + 1) == [start % item for start in [*starts, found.run]]
    if isinstance(found, Runs):
        assert [0] * (len(starts) + 1) == [start % found.grain for start in [*starts, found.run]]
    return {start // item + offset for start in starts for offset in range(found.run // item)}


def used(accesses: list[Access], base: Tensor, *, write: bool) -> set[int]:
    storage = base.untyped_storage().data_ptr()
    mine = [a for a in accesses if a.write == write and a.tensor.untyped_storage().data_ptr() == storage]
    return set[int]().union(*(elements(a.cells or cells.extent(a.tensor)) for a in mine))


INDEX = torch.tensor([3, 0, 3])
PAIR = torch.tensor([1, -1])
MASK = torch.tensor([True, False, False, True, False, True])
PATTERN = torch.tensor([[1, 0, 2], [0, 0, 1]])
WIDE = torch.arange(24).reshape(6, 4) % 5 == 1

Program = Callable[[Tensor, Tensor], Any]
# a [6, 4] and b [6, 4] of different values; what is touched is touched for a reason: it can change a result
EXACT: dict[str, Program] = {
    "rows": lambda a, b: a.index_select(0, INDEX),
    "columns": lambda a, b: a.index_select(1, INDEX),
    "rows of a transpose": lambda a, b: a.t().index_select(0, INDEX),
    "rows of a slice, out": lambda a, b: torch.index_select(a[1:, 1:3], 0, INDEX, out=b[1:4, 0:2]),
    "rows of three dimensions": lambda a, b: a.view(3, 2, 4).index_select(1, torch.tensor([1])),
    "int32 rows": lambda a, b: a.index_select(0, INDEX.int()),
    "brackets": lambda a, b: a[PAIR],
    "brackets, last dimension": lambda a, b: a[:, PAIR],
    "brackets, pairs": lambda a, b: a[INDEX[:2], PAIR],
    "brackets, outer": lambda a, b: a[INDEX[:, None], PAIR],
    "brackets, mask": lambda a, b: a[MASK],
    "brackets, whole mask": lambda a, b: a[WIDE],
    "brackets, mask and index": lambda a, b: a[MASK, torch.tensor(2)],
    "take": lambda a, b: a.t().take(torch.tensor([0, 7, -1])),
    "gather": lambda a, b: a.gather(0, PATTERN),
    "gather, columns of a slice": lambda a, b: a[2:, ::2].gather(1, PATTERN % 2),
    "masked_select": lambda a, b: a.masked_select(WIDE),
    "embedding": lambda a, b: torch.nn.functional.embedding(PATTERN, a),
    "cat, out": lambda a, b: torch.cat([a[:2], a[5:]], out=b[:3]),
    "stack": lambda a, b: torch.stack([a[0], b[1]]),
    "matmul": lambda a, b: a[:3] @ b[:2].t(),
    "sum of a column": lambda a, b: a[:, 1].sum(),
    "overlapping view": lambda a, b: a.view(-1).unfold(0, 3, 2).clone(),
    "copy": lambda a, b: a[1:3].copy_(b[::2][:2]),
    "copy to a transpose": lambda a, b: a.t()[1:3].copy_(b[:, 1:3].t()),
    "index_copy_": lambda a, b: a.index_copy_(0, torch.tensor([4, 1]), b[:2]),
    "index_copy_, columns": lambda a, b: a.index_copy_(1, torch.tensor([3, 1]), b[:, :2]),
    "index_add_": lambda a, b: a.index_add_(0, INDEX, b[:3]),
    "index_fill_": lambda a, b: a.index_fill_(1, torch.tensor([2]), 1e3),
    "put brackets": lambda a, b: a.__setitem__(torch.tensor([4, 1]), b[:2]),
    "put brackets, accumulate": lambda a, b: a.index_put_((INDEX, INDEX), b[0, :3], accumulate=True),
    "put brackets, mask": lambda a, b: a.__setitem__(MASK, 1e3),
    "put": lambda a, b: a.put_(torch.tensor([5, 20]), b[0, :2]),
    "scatter_": lambda a, b: a.scatter_(0, PATTERN + torch.tensor([[0], [3]]), b),
    "scatter_add_": lambda a, b: a.scatter_add_(1, PATTERN, b),
    "masked_fill_": lambda a, b: a.masked_fill_(MASK[:, None], 1e3),
    "fill a slice": lambda a, b: a[2:4].fill_(1e3),
    "add in place": lambda a, b: a[2:4].add_(b[0]),
    "many at once": lambda a, b: torch._foreach_mul_([a[0], b[1]], 3.0),
}


def bases() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.rand(2, 6, 4, generator=generator, dtype=torch.float64) + 1
    return a.clone(), b.clone()


def results(program: Program, a: Tensor, b: Tensor) -> list[list[float]]:
    result = program(a, b)
    fresh = isinstance(result, Tensor) and all(not used([read(result)], base, write=False) for base in (a, b))
    return [a.flatten().tolist(), b.flatten().tolist(), result.flatten().tolist() if fresh else []]


@pytest.mark.parametrize("program", EXACT.values(), ids=EXACT.keys())
def test_accesses_are_exact(program: Program) -> None:
    """An element counts as written if the operation changes it, as read if others' values depend on it; no more."""
    a, b = bases()
    with Recorder() as recorder:
        program(a, b)
    plain = results(program, *bases())
    for which, base in enumerate((a, b)):
        before = bases()[which].flatten().tolist()
        assert {at for at in range(24) if plain[which][at] != before[at]} == used(recorder.seen, base, write=True)
        matters = set()
        for at in range(24):
            fresh = bases()
            fresh[which].view(-1)[at] += 0.25
            for other, (seen, expected) in enumerate(zip(results(program, *fresh), plain, strict=True)):
                places = {place for place in range(len(seen)) if seen[place] != expected[place]}
                if places - ({at} if other == which else set()):
                    matters.add(at)
        written = used(recorder.seen, base, write=True)
        assert matters - written == used(recorder.seen, base, write=False) - written


def test_every_choice_is_tried() -> None:
    """Each operation whose index chooses cells is in the table above, in-place twins of the same code apart."""
    seen: set[str] = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    for program in EXACT.values():
        with Names():  # type: ignore[no-untyped-call] # the same
            program(*bases())
    twins = {f"aten::{name}" for name in ("_index_put_impl_", "index_reduce_", "scatter_reduce_", "masked_scatter_")}
    assert twins == set(CHOSEN) - seen


def test_a_coarser_choice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails when an index counts for all rows, and when a rule takes the wrong dimension."""
    for wrong in ({}, {"aten::index_select": {"self": lambda tensor, given: cells.rows(tensor, 1, given("index"))}}):
        monkeypatch.setattr(access, "CHOSEN", wrong)
        with pytest.raises(AssertionError):
            test_accesses_are_exact(EXACT["rows"])


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of element numbers: sliced with steps, permuted, perhaps with a dimension that repeats."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    view = torch.arange(int(np.prod(shape))).reshape(shape)
    for dim in range(len(shape)):
        view = view.narrow(dim, start := draw(st.integers(0, view.shape[dim] - 1)), view.shape[dim] - start)
        step = draw(st.integers(1, 2))
        view = view[(slice(None),) * dim + (slice(None, None, step),)]
    view = view.permute(draw(st.permutations(range(view.dim()))))
    return view.unsqueeze(0).expand(2, *view.shape) if draw(st.booleans()) else view


@given(views(), st.data())
def test_cells_of_any_view_and_index(view: Tensor, data: st.DataObject) -> None:
    """The cells of a view, and of any of its indexings, are the element numbers that torch itself finds there."""
    assert set(view.flatten().tolist()) == elements(cells.extent(view))
    dim = data.draw(st.integers(-view.dim(), view.dim() - 1))
    index = torch.tensor(data.draw(st.lists(st.integers(0, view.shape[dim] - 1), min_size=1, max_size=4)))
    assert set(view.index_select(dim, index).flatten().tolist()) == elements(cells.rows(view, dim, index))
    indices = [
        data.draw(st.none() | st.lists(st.integers(-size, size - 1), min_size=2, max_size=2)) for size in view.shape
    ]
    given_ = [None if index is None else torch.tensor(index) for index in indices]
    if any(index is not None for index in given_):
        picked = torch.ops.aten.index.Tensor(view, given_)
        assert set(picked.flatten().tolist()) == elements(cells.at(view, given_))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=view.shape[0], max_size=view.shape[0])))
    assert set(view[mask].flatten().tolist()) == elements(cells.at(view, [mask]))
    places = torch.tensor(data.draw(st.lists(st.integers(-view.numel(), view.numel() - 1), min_size=1, max_size=4)))
    assert set(view.take(places).tolist()) == elements(cells.flat(view, places))
    shape = [data.draw(st.integers(1, size)) for size in view.shape]
    pattern = torch.randint(view.shape[dim], shape, generator=torch.Generator().manual_seed(0))
    assert set(view.gather(dim, pattern).flatten().tolist()) == elements(cells.along(view, dim, pattern))


def seen_of(program: Callable[[], object]) -> list[tuple[tuple[int, ...], bool, bool]]:
    with Recorder() as recorder:
        program()
    return [(tuple(access.tensor.shape), access.write, access.fresh) for access in recorder.seen]


def test_views_touch_nothing() -> None:
    """A view neither reads nor writes; nor does a question about metadata."""
    a, _ = bases()

    def program() -> None:
        a.view(3, 8).reshape(24).view(-1, 2, 6).unsqueeze_(0).squeeze(0).detach().flatten(1).t()
        a[1:, None].expand(5, 3, 4).permute(2, 0, 1).split(2)
        a.view(torch.uint8).unfold(0, 2, 1).chunk(2)
        a.is_same_size(a)

    assert [] == seen_of(program)


def test_new_memory() -> None:
    """A result is new memory and written, also an empty one: who else uses it must be ordered after its allocation."""
    a, _ = bases()
    assert [((3,), True, True)] == seen_of(lambda: torch.empty(3))
    assert [((2,), True, True)] == seen_of(lambda: torch.tensor([1, 2]))
    assert [((2,), True, True)] == seen_of(lambda: a.new_empty(2))
    assert [((6, 4), True, True)] == seen_of(lambda: torch.zeros_like(a))
    assert [((6, 4), False, False), ((6, 4), True, True)] == seen_of(lambda: a * 2)
    assert [((6, 4), False, False)] * 2 + [((6, 4), True, True)] * 2 == seen_of(lambda: torch._foreach_add([a, a], 1))
    assert [] == seen_of(a[:0].clone)


def test_host_reads() -> None:
    """What the host asks for is a read of its tensor."""
    a, _ = bases()
    assert [((1,), False, False)] == seen_of(a.view(-1)[:1].item)
    assert [((6, 4), False, False)] * 2 == seen_of(lambda: torch.equal(a, a.view(6, 4)))


def test_bytes_of_another_dtype() -> None:
    """A view of another dtype touches the bytes it says, and rows stay runs of bytes."""
    a, _ = bases()
    found = cells.rows(a.view(torch.uint8), 0, torch.tensor([4, 2]))
    assert isinstance(found, Runs)
    assert ([128, 64], 32, 32) == (found.starts.tolist(), found.run, found.grain)
    assert Block(8 * 5, 8 * 2) == cells.extent(a.view(-1)[5:7].view(torch.uint8))


@pytest.fixture
def custom() -> Iterator[Any]:
    library = torch.library.Library("kvshard_test", "DEF")
    library.define("fill_rows(Tensor(a!) out, Tensor rows, int value) -> ()")

    def fill_rows(out: Tensor, rows: Tensor, value: int) -> None:
        out.index_fill_(0, rows, value)

    library.impl("fill_rows", fill_rows, "CPU")
    yield torch.ops.kvshard_test.fill_rows.default
    library._destroy()


def test_unknown_operations(custom: Any) -> None:
    """An operation that is not of torch, or whose schema hides what it changes, is an error until it is declared."""
    a, _ = bases()
    recorder = Recorder()
    with (
        recorder,
        pytest.raises(UnknownOp, match=r"declare\('kvshard_test::fill_rows', reads=\[...\], writes=\[...\]\)"),
    ):
        custom(a, INDEX, 5)
    with recorder, pytest.raises(UnknownOp, match=r"aten.native_batch_norm.default: it is not known which tensors"):
        torch.native_batch_norm(a, None, None, torch.zeros(4).double(), torch.ones(4).double(), True, 0.1, 1e-5)
    recorder.seen.clear()
    recorder.operations.declare(custom, reads=["rows"], writes=["out"])
    with recorder:
        custom(a, INDEX, 6)
    assert [((3,), False), ((6, 4), True)] == [(tuple(seen.tensor.shape), seen.write) for seen in recorder.seen]


def test_a_wrong_declaration(custom: Any) -> None:
    """A name that is no tensor argument is an error that lists the arguments."""
    operations = Operations()
    operations.declare("kvshard_test::fill_rows", writes=["target"])
    with pytest.raises(
        UnknownOp, match=r"no tensor argument \['target'\], expected some of \['out', 'rows', 'value'\]"
    ):
        operations.accesses(custom, (), {}, None)

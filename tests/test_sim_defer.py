"""Every class of torch operation, run late: the right values, nothing of them early, the same shapes and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from ci.register import register_cpu_ci
from harness.sim import Simulation, defer
from harness.sim.defer import Shapes
from harness.sim.queue import Queue
from harness.sim.schedule import HOLD, IN_ORDER, LAZY, Schedule

register_cpu_ci(est_time=20, stage="commit")

Case = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""An operation on x [4, 6], y [4, 6], index [3] of rows, and mask [4, 6]; what it returns and x and y are compared."""


def out_of(call: Callable[..., Any], *args: Any, shape: tuple[int, ...] = (4, 6), **kwargs: Any) -> Tensor:
    out = torch.full(shape, 7.0)
    call(*args, out=out, **kwargs)
    return out


def set_(target: Tensor, key: Any, value: Any) -> None:
    target[key] = value


def grown(x: Tensor) -> Tensor:
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    return out


def backward(x: Tensor) -> Tensor:
    weight = torch.full((6, 2), 0.5, requires_grad=True)
    (functional.gelu(x @ weight).square().sum()).backward()
    assert weight.grad is not None
    return weight.grad


CASES: dict[str, Case] = {
    # functional
    "add": lambda x, y, i, m: x + y,
    "scalar": lambda x, y, i, m: 2.5 * x - 1,
    "compare": lambda x, y, i, m: (x > y) & (x != 3),
    "where": lambda x, y, i, m: torch.where(m, x, y),
    "matmul": lambda x, y, i, m: x @ y.T,
    "linear": lambda x, y, i, m: functional.linear(x, y, y[:, 0]),
    "einsum": lambda x, y, i, m: torch.einsum("ij,kj->ik", x, y),
    "bmm": lambda x, y, i, m: torch.bmm(x.view(2, 2, 6), y.view(2, 6, 2)),
    "softmax": lambda x, y, i, m: x.softmax(-1),
    "sdpa": lambda x, y, i, m: functional.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None]),
    "layer_norm": lambda x, y, i, m: functional.layer_norm(x, (6,), y[0], y[1]),
    "cumsum": lambda x, y, i, m: x.cumsum(0),
    "sum": lambda x, y, i, m: (x.sum(), x.sum(1), x.mean(0, keepdim=True)),
    "max": lambda x, y, i, m: x.max(1),
    "sort": lambda x, y, i, m: x.sort(1, descending=True),
    "argsort": lambda x, y, i, m: (x.argsort(0), y.argmin(1)),
    "topk": lambda x, y, i, m: x.topk(2, 1),
    "cat": lambda x, y, i, m: torch.cat([x, y[:1]]),
    "stack": lambda x, y, i, m: torch.stack([x, y], 1),
    "pad": lambda x, y, i, m: functional.pad(x, (1, 2), value=9.0),
    "gather": lambda x, y, i, m: x.gather(0, i[None].expand(2, 3)),
    "take": lambda x, y, i, m: x.take(i),
    "embedding": lambda x, y, i, m: functional.embedding(i, x),
    "one_hot_less": lambda x, y, i, m: torch.zeros(3, 4).scatter(1, i[:, None], 1.0),
    "clone": lambda x, y, i, m: x.clone(),
    "to_dtype": lambda x, y, i, m: (x.to(torch.int64), x.bfloat16(), x.bool(), x.double()),
    "contiguous": lambda x, y, i, m: x.T.contiguous(),
    "flip": lambda x, y, i, m: x.flip(0),
    "roll": lambda x, y, i, m: x.roll(2, 1),
    "repeat": lambda x, y, i, m: x.repeat(2, 1),
    "foreach": lambda x, y, i, m: torch._foreach_add([x, y], 1.0),
    "cdist": lambda x, y, i, m: torch.cdist(x, y),
    "complex": lambda x, y, i, m: torch.view_as_real(torch.complex(x, y) * 2),
    "searchsorted": lambda x, y, i, m: torch.searchsorted(x[0].sort().values, y[0]),
    "histc": lambda x, y, i, m: torch.histc(x, 4, 0, 24),
    # in place
    "add_": lambda x, y, i, m: x.add_(y),
    "mul_slice": lambda x, y, i, m: x[1:3, ::2].mul_(2),
    "copy_": lambda x, y, i, m: x.copy_(y),
    "copy_cast": lambda x, y, i, m: x.copy_(i[0]),
    "fill_": lambda x, y, i, m: x.fill_(3),
    "zero_": lambda x, y, i, m: x[0].zero_(),
    "clamp_": lambda x, y, i, m: x.clamp_(2, 9),
    "masked_fill_": lambda x, y, i, m: x.masked_fill_(m, -1.0),
    "scatter_": lambda x, y, i, m: x.scatter_(0, i[None], y[:1, :3]),
    "scatter_add_": lambda x, y, i, m: x.scatter_add_(0, i[None].expand(2, 3), y),
    "scatter_reduce_": lambda x, y, i, m: x.scatter_reduce_(0, i[None], y, "amax"),
    "index_copy_": lambda x, y, i, m: x.index_copy_(0, i, y[:3]),
    "index_add_": lambda x, y, i, m: x.index_add_(0, i, y[:3]),
    "index_fill_": lambda x, y, i, m: x.index_fill_(1, i, 5.0),
    "foreach_": lambda x, y, i, m: torch._foreach_mul_([x, y], 3.0),
    "exponent": lambda x, y, i, m: x.__ipow__(2),
    # out=
    "out": lambda x, y, i, m: out_of(torch.add, x, y),
    "out_slice": lambda x, y, i, m: torch.mul(y[:2], 2, out=x[1:3]),
    "out_select": lambda x, y, i, m: torch.index_select(y, 0, i, out=x[:3]),
    "out_cat": lambda x, y, i, m: out_of(torch.cat, [x[:2], y[2:]]),
    "out_matmul": lambda x, y, i, m: out_of(torch.matmul, x, y.T, shape=(4, 4)),
    "out_grown": lambda x, y, i, m: grown(x),
    "out_two": lambda x, y, i, m: torch.max(x, 1, out=(torch.empty(4), torch.empty(4, dtype=torch.int64))),
    # views: the same storage, before and after the data comes
    "transpose": lambda x, y, i, m: x.t().add_(1).t(),
    "view": lambda x, y, i, m: (x + y).view(2, 12)[1].add_(5),
    "split": lambda x, y, i, m: [part.neg_() for part in x.split([1, 3])],
    "permute": lambda x, y, i, m: (x * 2).view(2, 2, 6).permute(2, 0, 1),
    "as_strided": lambda x, y, i, m: x.as_strided((2, 2), (1, 3), 4).add_(1),
    "bytes": lambda x, y, i, m: x.view(torch.uint8).bitwise_not_(),
    "expand": lambda x, y, i, m: y[:1].expand(4, 6) + x,
    "unbind": lambda x, y, i, m: x.unbind(1)[2].mul_(4),
    "diagonal": lambda x, y, i, m: x.diagonal().fill_(0),
    "flatten": lambda x, y, i, m: x.T.flatten().add_(3),
    "unsqueeze_": lambda x, y, i, m: (x + 1).unsqueeze_(0),
    "t_": lambda x, y, i, m: (x * 3).t_().add_(y.T),
    "detach": lambda x, y, i, m: x.detach().mul_(2),
    # indexing
    "x[rows]": lambda x, y, i, m: x[i],
    "x[rows, columns]": lambda x, y, i, m: x[i, i + 1],
    "x[rows] = ": lambda x, y, i, m: set_(x, i, y[:3]),
    "x[a:b] = ": lambda x, y, i, m: set_(x, slice(1, 3), y[:2]),
    "x[a:b] = scalar": lambda x, y, i, m: set_(x, slice(1, 3), 0.5),
    "x[mask] = scalar": lambda x, y, i, m: set_(x, m, 0.25),
    "x[rows] += ": lambda x, y, i, m: x.index_put_((i,), y[:3], accumulate=True),
    "index_select": lambda x, y, i, m: x.index_select(1, i),
    # factories
    "arange": lambda x, y, i, m: torch.arange(5) + 1,
    "full": lambda x, y, i, m: (torch.full((2,), 3), torch.full((2,), 3.0), torch.full((2,), False)),
    "zeros": lambda x, y, i, m: (torch.zeros(3), torch.ones(2, dtype=torch.uint8), torch.eye(2)),
    "ones": lambda x, y, i, m: torch.ones(3),
    "like": lambda x, y, i, m: (torch.zeros_like(x), x.new_full((2, 2), 1.5), torch.full_like(i, 7)),
    "linspace": lambda x, y, i, m: torch.linspace(0, 1, 5),
    "tensor": lambda x, y, i, m: torch.tensor([1, 2, 3]) * 2,
    "tril": lambda x, y, i, m: torch.ones(3, 3).tril_(),
    "empty": lambda x, y, i, m: torch.empty(4, 6).copy_(x),
    "float8": lambda x, y, i, m: x.to(torch.float8_e4m3fn).view(torch.uint8)[i],
    "scalar_tensor": lambda x, y, i, m: torch.scalar_tensor(4.0) * x,
    # autograd
    "backward": lambda x, y, i, m: backward(x),
    "grad": lambda x, y, i, m: torch.autograd.grad((p := x.clone().requires_grad_()).pow(2).sum(), p),
}

# the host waits: shapes or values are known only when the work before is done
WAITS: dict[str, Case] = {
    "x[mask]": lambda x, y, i, m: x[m],
    "x[mask] = tensor": lambda x, y, i, m: set_(x, x > 3, y.flatten()[: int((x > 3).sum())]),
    "nonzero": lambda x, y, i, m: m.nonzero(),
    "where(c)": lambda x, y, i, m: torch.where(m),
    "unique": lambda x, y, i, m: i.unique(return_counts=True),
    "unique_consecutive": lambda x, y, i, m: torch.unique_consecutive(i),
    "masked_select": lambda x, y, i, m: x.masked_select(m),
    "bincount": lambda x, y, i, m: i.bincount(),
    "repeat_interleave": lambda x, y, i, m: x.repeat_interleave(torch.tensor([0, 1, 2, 1]), 0),
    "item": lambda x, y, i, m: x[1, 2].item(),
    "bool": lambda x, y, i, m: bool(x[0, 0] > 0),
    "int": lambda x, y, i, m: int(i[1]) + round(float(x[0, 1])),
    "index": lambda x, y, i, m: [10, 20, 30][i[0]],
    "equal": lambda x, y, i, m: torch.equal(x, y),
    "allclose": lambda x, y, i, m: torch.allclose(x, y),
    "any": lambda x, y, i, m: bool(m.any()) and bool((x >= 0).all()),
    "in": lambda x, y, i, m: 3 in i,
}


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return Shapes()


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.arange(24, dtype=torch.float32).view(4, 6)
    return x, (x * 7 + 3) % 11, torch.tensor([2, 0, 3]), x % 3 == 0


def flat(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [(value.dtype, value.shape, value.stride(), bits(value))]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in flat(part)]
    return [value]


def bits(value: Tensor) -> list[int]:
    plain: list[int] = value.detach().contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
    return plain


def play(case: Case, schedule: Schedule | None, shapes: Shapes) -> tuple[list[Any], list[bool], Simulation]:
    """What the case gave, and whether each of its tensors and of x and y had that value before the end."""
    simulation = Simulation(1, schedule, shapes=shapes)
    given = inputs()
    with simulation.devices[0].active():
        first = [value + 0 if value.dtype is not torch.bool else value | False for value in given]
        result = case(*first)
    tensors = [leaf for leaf in [*leaves(result), *first[:2]] if leaf.numel()]
    early = [bits(tensor) for tensor in tensors]
    simulation.finish()
    return flat([result, first[:2]]), [now == bits(t) for now, t in zip(early, tensors, strict=True)], simulation


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("schedule", [LAZY, IN_ORDER, ((0, HOLD), (5, 0)), ((0, HOLD), (6, 0), (7, HOLD))])
@pytest.mark.parametrize("name", [*CASES, *WAITS])
def test_values(name: str, schedule: Schedule, shapes: Shapes) -> None:
    """Whenever it runs, an operation gives the values, shapes, strides and dtypes that plain torch gives."""
    case = {**CASES, **WAITS}[name]
    x, y, index, mask = inputs()
    expected = flat([case(x, y, index, mask), [x, y]])
    assert expected == play(case, schedule, shapes)[0]


@pytest.mark.parametrize("name", CASES)
def test_nothing_comes_early(name: str, shapes: Shapes) -> None:
    """While nothing runs, no result and no input holds its final value, and no host waited for one."""
    _, early, simulation = play(CASES[name], LAZY, shapes)
    assert [] == list(simulation.syncs)
    assert [False] * len(early) == early


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits(name: str, shapes: Shapes) -> None:
    """What needs values is a wait at this file's call site, also when all work is done."""
    for schedule in (LAZY, IN_ORDER):
        syncs = play(WAITS[name], schedule, shapes)[2].syncs
        assert [True] * len(syncs) == [site.startswith("tests/test_sim_defer.py:") for site in syncs]
        assert sum(syncs.values()) >= 1


def test_masked_fill_is_no_wait(shapes: Shapes) -> None:
    """One value at a mask counts nothing, a tensor of values at a mask does; indices never do."""
    assert {} == play(lambda x, y, i, m: set_(x, m, 1.0), LAZY, shapes)[2].syncs
    assert {} == play(lambda x, y, i, m: set_(x, i, y[:3]), LAZY, shapes)[2].syncs
    assert 1 == sum(play(lambda x, y, i, m: set_(x, m, y[0, :1].expand(8)), LAZY, shapes)[2].syncs.values())


@settings(deadline=None)
@given(st.lists(st.sampled_from(["rand", "dropout", "randperm", "normal_", "bernoulli", "multinomial"]), max_size=6))
def test_random_numbers_do_not_depend_on_the_schedule(names: list[str]) -> None:
    """The n-th draw of a program is the same under every schedule, and moves the generator on alike."""
    draws: dict[str, Callable[[], Tensor]] = {
        "rand": lambda: torch.rand(2),
        "dropout": lambda: functional.dropout(torch.ones(8)),
        "randperm": lambda: torch.randperm(4),
        "normal_": lambda: torch.zeros(2).normal_(),
        "bernoulli": lambda: torch.bernoulli(torch.full((5,), 0.5)),
        "multinomial": lambda: torch.full((3,), 0.3).multinomial(2),
    }
    found = []
    for schedule in (None, LAZY, ((0, HOLD), (2, 0), (3, HOLD))):
        torch.manual_seed(5)
        simulation = Simulation(1, schedule)
        with simulation.devices[0].active():
            drawn = [draws[name]() for name in names]
        simulation.finish()
        found.append(([bits(tensor) for tensor in drawn], torch.rand(1).item()))
    assert [found[0]] * 3 == found


def test_pending_work_keeps_a_tensor_that_is_reshaped(shapes: Shapes) -> None:
    """What was issued on a tensor is done to the memory and shape it had, whatever the object becomes."""
    simulation = Simulation(1, LAZY, shapes=shapes)
    with simulation.devices[0].active():
        x, other = torch.zeros(2, 3), torch.zeros(4)
        view = x.view(-1)
        x.add_(torch.arange(3.0))
        x.t_()
        x.mul_(torch.arange(3.0)[:, None])
        x.set_(other)  # type: ignore[call-overload]  # the stub knows storages only
        x.sub_(1)
    simulation.finish()
    assert ([0, 1, 4] * 2, [-1] * 4) == (view.tolist(), x.tolist())


def test_the_checks_see_early_work(monkeypatch: pytest.MonkeyPatch, shapes: Shapes) -> None:
    """A queue that runs what should wait, or results without poison, do not pass the checks above."""
    with monkeypatch.context() as broken:
        broken.setattr(Queue, "ready", lambda *_: True)
        with pytest.raises(AssertionError):
            test_nothing_comes_early("add", shapes)
    with monkeypatch.context() as broken:
        broken.setattr(defer, "poison", lambda tensor: tensor.fill_(1))
        with pytest.raises(AssertionError):
            test_nothing_comes_early("ones", shapes)
    test_nothing_comes_early("add", shapes)

"""What is known of an operation before it runs: its kind, the shape of its result, and the poison in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ci.register import register_cpu_ci
from harness.sim import Simulation
from harness.sim.defer import Kind, Shapes, classify
from harness.sim.queue import FailedLater
from harness.sim.race import UnknownOp
from harness.sim.schedule import HOLD, IN_ORDER, LAZY, only

register_cpu_ci(est_time=10, stage="commit")


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return Shapes()


class TestPoison:
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    )
    def test_floats(self, dtype: torch.dtype) -> None:
        """Floats are NaN until they are computed, and in memory that nothing was written to."""
        simulation = Simulation(1, LAZY)
        with simulation.devices[0].active():
            fresh = [torch.empty(3, dtype=dtype), torch.ones(3, dtype=dtype), torch.zeros(2).to(dtype)]
        assert all(math.isnan(value) for tensor in fresh for value in tensor.float().tolist())

    @pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
    def test_integers(self, dtype: torch.dtype) -> None:
        """Integers are far out of the range of any index."""
        simulation = Simulation(1, LAZY)
        with simulation.devices[0].active():
            fresh = torch.arange(3, dtype=dtype)
        assert (fresh.long() <= -91).all()

    def test_booleans(self) -> None:
        """Booleans are True, a value that a mask may have."""
        simulation = Simulation(1, LAZY)
        with simulation.devices[0].active():
            fresh = torch.zeros(3, dtype=torch.bool)
        assert [True] * 3 == fresh.tolist()

    def test_as_an_index(self) -> None:
        """An index that is read before it was computed fails as a finding that names the reader's call site."""
        simulation = Simulation(1, ((0, HOLD), (1, only(1))))
        device = simulation.devices[0]
        x = torch.arange(8)
        with device.active():
            side = device.Stream()
            index = torch.arange(2)  # on the default stream, and nobody waits for it
            with device.stream(side), pytest.raises(FailedLater, match=r"index_select.*test_as_an_index.*IndexError"):
                x.index_select(0, index)


class TestShapes:
    def test_errors_of_shapes_come_at_the_call(self, shapes: Shapes) -> None:
        """A call that no shape allows fails where it is made, as in plain torch."""
        simulation = Simulation(1, LAZY, shapes=shapes)
        with simulation.devices[0].active():
            x = torch.zeros(2, 3)
            calls: list[Callable[[], Any]] = [lambda: x @ x, lambda: x.copy_(x.T), lambda: torch.cat([x, x[0]])]
            for call in calls:
                with pytest.raises(RuntimeError):
                    call()

    def test_inferred_once(self) -> None:
        """The second call with such shapes and scalars infers nothing; another shape or kind of scalar does."""
        shapes = Shapes()
        for count, values in ((1, (1.0,)), (1, (1.0,)), (2, (1.0, 1)), (3, (1.0, 1, True))):
            simulation = Simulation(1, LAZY, shapes=shapes)
            with simulation.devices[0].active():
                dtypes = [torch.full((2,), value).dtype for value in values]
            assert [torch.float32, torch.int64, torch.bool][: len(values)] == dtypes
            assert count == len(shapes._recipes)

    def test_sharing(self, shapes: Shapes) -> None:
        """Two results of one recipe are two memories."""
        simulation = Simulation(1, LAZY, shapes=shapes)
        with simulation.devices[0].active():
            one, other = torch.zeros(2), torch.zeros(2)
            other.add_(1)
        simulation.finish()
        assert ([0, 0], [1, 1]) == (one.tolist(), other.tolist())


class TestUnknown:
    @pytest.fixture
    def library(self) -> Iterator[torch.library.Library]:
        with torch.library._scoped_library("simtest", "DEF") as library:
            library.define("peek(Tensor x) -> float")
            library.define("stamp(Tensor x) -> Tensor")
            library.impl("peek", lambda x: float(x.sum()), "CPU")
            library.impl("stamp", lambda x: x + 1, "CPU")
            yield library

    def test_a_value_without_a_tag(self, library: torch.library.Library) -> None:
        """An operation that may hand values to the host and does not say so is an error, never a silent wait."""
        simulation = Simulation(1, LAZY)
        with (
            simulation.devices[0].active(),
            pytest.raises(UnknownOp, match=r"simtest.peek.*returns no tensor.*data_dep"),
        ):
            torch.ops.simtest.peek(torch.zeros(2))

    def test_no_shape_without_values(self, library: torch.library.Library) -> None:
        """An operation that cannot tell its result's shape cannot wait; it runs where nothing has to."""
        for schedule in (LAZY, IN_ORDER):
            simulation = Simulation(1, schedule)
            with simulation.devices[0].active():
                x = torch.zeros(2)
                if schedule:
                    with pytest.raises(UnknownOp, match=r"simtest.stamp.default: it cannot tell the shape"):
                        torch.ops.simtest.stamp(x)
                else:
                    assert [1, 1] == torch.ops.simtest.stamp(x).tolist()

    def test_a_fake_kernel_helps(self, library: torch.library.Library) -> None:
        """With a fake kernel it waits like any other."""
        torch.library.register_fake("simtest::stamp", torch.empty_like, lib=library)
        simulation = Simulation(1, LAZY)
        with simulation.devices[0].active():
            stamped = torch.ops.simtest.stamp(torch.zeros(2))
        simulation.finish()
        assert [1, 1] == stamped.tolist()

    def test_other_devices(self) -> None:
        """A tensor that is not on the CPU cannot wait."""
        simulation = Simulation(1, LAZY)
        with simulation.devices[0].active(), pytest.raises(UnknownOp, match="a tensor on meta of layout"):
            torch.empty(3, device="meta").add(1)


def test_kinds() -> None:
    """One of each kind."""
    aten = torch.ops.aten
    kinds = {
        aten.view.default: Kind.VIEW,
        aten.size.default: Kind.VIEW,
        aten.empty.memory_format: Kind.EMPTY,
        aten.lift_fresh.default: Kind.LIFT,
        aten.t_.default: Kind.RESHAPE,
        aten.set_.source_Tensor: Kind.RESHAPE,
        aten.nonzero.default: Kind.ANSWER,
        aten._local_scalar_dense.default: Kind.ANSWER,
        aten.index.Tensor: Kind.DATA,
        aten.add_.Tensor: Kind.DATA,
    }
    assert kinds == {func: classify(func).kind for func in kinds}

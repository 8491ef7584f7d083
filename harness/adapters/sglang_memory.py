"""Which memory is the host's where all tensors are on the CPU: what sglang makes without naming its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from harness.sim.device import Simulation
from harness.sim.memory import mark_host

AT = "cpu:0"  # the device's name, as sglang is told it; plain "cpu", or no name, is the host


class HostMemory(TorchFunctionMode):
    """Within, a tensor that is made without the device's name is in host memory, where a GPU would have it, too.

    So the host reads its own lengths and slots without a wait for a stream, and such a wait cannot hide a missing one.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        simulation.sites.skip(__file__)  # every call goes through here, and none comes from here
        self._constructors: set[Callable[..., Any]] = _device_constructors()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make the tensor outside of the simulation, and mark it; all else goes on as it is."""
        kwargs = kwargs or {}
        if func not in self._constructors or _on_device(kwargs.get("device")) or any(map(_is_tensor, args)):
            return func(*args, **kwargs)
        with self._simulation.quiet:
            made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            self._simulation.host_memory = True
            mark_host(made, pinned=bool(kwargs.get("pin_memory")))
        return made


def _on_device(device: Any) -> bool:
    return device is not None and torch.device(device).index is not None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)

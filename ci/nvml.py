"""The memory of NVIDIA GPUs, asked from the driver. Needs the package nvidia-ml-py."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ci.leases import LeaseError, visible
from harness.launch.gpus import VARIABLE


class NvmlProbe:
    """A `Probe` whose ids are the UUIDs of the GPUs, which CUDA_VISIBLE_DEVICES takes as well.

    An index means the driver's order, that of the bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID where CUDA counts otherwise.
    """

    def __init__(self, environment: Mapping[str, str], library: Any = None) -> None:
        self._nvml = _library() if library is None else library
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            self._handles = {_text(self._nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        except self._nvml.NVMLError as error:
            raise LeaseError(f"NVML: {error}; expected a working driver; run nvidia-smi, or use --no-lease") from error
        self._visible = tuple(visible(tuple(self._handles), environment.get(VARIABLE)))

    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves, in the driver's order: all processes lock in it."""
        return tuple(gpu for gpu in self._handles if gpu in self._visible)

    def used_bytes(self, gpu: str) -> int:
        """Memory in use, by any process. Raises `LeaseError`."""
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[gpu]).used)
        except self._nvml.NVMLError as error:
            raise LeaseError(f"NVML: memory of {gpu}: {error}; expected a number; look at nvidia-smi") from error


def _library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise LeaseError(
            f"GPU leases need NVML ({error}); install it with: pip install nvidia-ml-py, or use --no-lease"
        ) from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def gpu_state(library: Any = None) -> list[dict[str, Any]] | str:
    """What each GPU holds and who uses it, or why that is not known. Never fails."""
    try:
        nvml = _library() if library is None else library
    except LeaseError:
        return "not known: nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        return [_state(nvml, nvml.nvmlDeviceGetHandleByIndex(at)) for at in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return f"not known: {error}"


def _state(nvml: Any, handle: Any) -> dict[str, Any]:
    """One GPU; what its driver does not tell is left out."""
    asked: Mapping[str, Callable[[], Any]] = {
        "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(handle)),
        "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "used_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        "total_bytes": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        "busy_percent": lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "celsius": lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "processes": lambda: [
            {"pid": made.pid, "used_bytes": made.usedGpuMemory}
            for made in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ],
    }
    found = {}
    for name, ask in asked.items():
        with contextlib.suppress(nvml.NVMLError):
            found[name] = ask()
    return found

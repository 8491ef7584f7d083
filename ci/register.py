"""The markers of `harness.register`, under the name that tests of CI runners import them by."""

from harness.register import register_cpu_ci, register_gpu_ci

__all__ = ["register_cpu_ci", "register_gpu_ci"]

"""One rank of the reference's server, with the transports that there are."""

from __future__ import annotations

from pathlib import Path

from harness.adapters.ref_process import TRANSPORTS
from harness.transports.staged import Staged
from kvshard_ref.server.build import run
from kvshard_ref.server.settings import Settings
from kvshard_ref.transport import Transport


def connect(settings: Settings, name: str, book: Path) -> Transport:
    """An end of this rank; the transports know memory of the CPU alone."""
    end = TRANSPORTS[settings.disaggregation_transfer_backend](name, book)
    return end if settings.device == "cpu" else Staged(end)


def serve_rank() -> None:
    """Serves until the face is gone."""
    run(connect)

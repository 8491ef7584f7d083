"""The reference as a server: `serve(settings)` runs the face in this process and each rank in one of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from harness.usage import UserError
from kvshard_ref.server.front import RanksBackend, rank_program
from kvshard_ref.server.http import app_of
from kvshard_ref.server.settings import Settings, SettingsError, add_flags, settings_of
from kvshard_ref.server.text import ByteTokenizer

BACKENDS = ("tcp", "nixl", "mooncake", "staged")
"""The names of `ref_process.TRANSPORTS`, which a rank alone imports: the face needs no torch, which takes seconds."""
TINY = Path(__file__).parent.parent.parent / "fixtures" / "model"
RANK = "harness.serve_rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a worker; the model is the tiny one unless another is named."""
    add_flags(parser)
    parser.set_defaults(model_path=str(TINY), load_format="auto" if (TINY / "model.safetensors").exists() else "dummy")


def settings_from(args: argparse.Namespace) -> Settings:
    """Raises UserError for flags that cannot work."""
    try:
        return settings_of(args, BACKENDS)
    except SettingsError as error:
        raise UserError(str(error)) from error


async def serve(settings: Settings) -> int:
    """Until a signal, 0, or until a rank is gone, 1."""
    backend = RanksBackend(settings, rank_program(RANK))
    try:
        await backend.start()
        tokenizer = ByteTokenizer.load(Path(settings.model_path))
        apps = [(app_of(backend, tokenizer), settings.port)]
        if settings.disaggregation_mode == "prefill":
            apps.append((book_app(backend), settings.disaggregation_bootstrap_port))
        servers = [
            _Server(uvicorn.Config(app, settings.host, port, log_level="warning", timeout_graceful_shutdown=3))
            for app, port in apps
        ]
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, _end, servers)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_end_with(backend, servers))
            tell = tasks.create_task(_tell(settings, servers))
            await asyncio.gather(*(server.serve() for server in servers))
            watch.cancel()
            tell.cancel()
        return int(backend.failed.is_set())
    finally:
        await backend.close()


def book_app(backend: RanksBackend) -> FastAPI:
    """Where decode workers find a prefill worker's ranks, and tell of themselves."""
    app = FastAPI()

    @app.post("/book")
    async def book(theirs: dict[str, str]) -> dict[str, Any]:
        return backend.met(theirs)

    return app


class _Server(uvicorn.Server):
    """Signals are for all servers of this process together."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them alone."""
        yield


def _end(servers: list[_Server]) -> None:
    for server in servers:
        server.should_exit = True


async def _tell(settings: Settings, servers: list[_Server]) -> None:
    """Where the worker answers, once it does."""
    while not all(server.started for server in servers):  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.02)
    port = servers[0].servers[0].sockets[0].getsockname()[1]
    kind = "plain" if settings.disaggregation_mode == "null" else settings.disaggregation_mode
    sys.stderr.write(f"{kind} worker of {settings.ranks} ranks at http://{settings.host}:{port}\n")


async def _end_with(backend: RanksBackend, servers: list[_Server]) -> None:
    await backend.failed.wait()
    await asyncio.sleep(0.5)  # what was asked gets its answer
    _end(servers)

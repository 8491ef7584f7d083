"""The reference as a server: `serve(settings)` runs the face in this process and each rank in one of its own."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from harness.adapters.ref_process import TRANSPORTS
from harness.usage import UserError
from kvshard_ref.server.front import RanksBackend, rank_program
from kvshard_ref.server.http import app_of
from kvshard_ref.server.settings import Settings, SettingsError, add_flags, settings_of
from kvshard_ref.server.text import ByteTokenizer

BACKENDS = tuple(TRANSPORTS)
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
            uvicorn.Server(uvicorn.Config(app, settings.host, port, log_level="warning", timeout_graceful_shutdown=3))
            for app, port in apps
        ]
        watch = asyncio.create_task(_end_with(backend, servers))
        await asyncio.gather(*(server.serve() for server in servers))
        watch.cancel()
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


async def _end_with(backend: RanksBackend, servers: list[uvicorn.Server]) -> None:
    await backend.failed.wait()
    await asyncio.sleep(0.5)  # what was asked gets its answer
    for server in servers:
        server.should_exit = True

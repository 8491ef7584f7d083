"""llama.cpp's own server in the foreground: `python -m ci.llamacpp_serve --model FILE --host 127.0.0.1 --port PORT`.

Needs the package xllamacpp alone, so the environment that it runs in holds nothing of the harness. Weights and cache
are computed in float32 and without flash attention, so that answers differ by rounding only. SIGTERM or SIGINT ends it.
"""

from __future__ import annotations

import argparse
import os
import signal
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import xllamacpp  # type: ignore[import-not-found,unused-ignore]  # of an environment of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the server can be started with."""
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FILE", help="a GGUF file")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--slots", type=int, default=4, help="requests that are answered at the same time")
    add("--context", type=int, default=1024, help="tokens of prompt and answer of each slot")
    add("--batch", type=int, default=128, help="tokens of prompt that are computed at once")
    add("--save", type=Path, required=True, metavar="FOLDER", help="slots are saved here; without it none is erased")
    add("--tier", type=int, default=0, help="tokens that the harness may keep in saved slots; 0: it keeps none")
    add("--ram-mib", type=int, default=0, help="room for prompts that have left their slot; 0: they are dropped")


def params(args: argparse.Namespace) -> xllamacpp.CommonParams:
    """As the server wants it."""
    made = xllamacpp.CommonParams()
    made.model.path = str(args.model)
    made.hostnames, made.port = [args.host], args.port
    made.n_parallel, made.n_ctx = args.slots, args.slots * args.context
    made.n_batch = made.n_ubatch = args.batch
    made.cpuparams.n_threads = made.cpuparams_batch.n_threads = 1
    made.endpoint_metrics = made.endpoint_slots = made.endpoint_props = True
    made.slot_save_path = f"{args.save.absolute()}/"
    made.cache_ram_mib = args.ram_mib
    made.cache_type_k = made.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    made.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    # what the engine itself does not tell
    tags = {"version": version("xllamacpp"), "batch": args.batch, "cache": "f32", "tier": args.tier}
    made.model_tags = {f"{name}={value}" for name, value in tags.items()}
    made.warmup = made.ui = False
    return made


def main(arguments: list[str] | None = None) -> NoReturn:
    """Serves until a signal comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add_arguments(parser)
    args = parser.parse_args(arguments)
    if not args.model.is_file():
        parser.error(f"there is no model {args.model}; write one: python -m ci.llamacpp_model FOLDER")
    args.save.mkdir(parents=True, exist_ok=True)
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server's own threads are there
    server = xllamacpp.Server(params(args))
    print(server.listening_address, flush=True)
    signal.sigwait(ends)
    os._exit(0)  # the server's own end waits for ever for an answer that is under way


if __name__ == "__main__":
    main()

"""The program of one rank process: `python -m harness.adapters.ref_process RANK RANKS BACKEND PORT`.

Reads asks from standard input and writes answers to standard output, until the pipe ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it in __all__

from harness.adapters.late import late_device
from harness.adapters.ref_decode import rank_name, sends
from harness.adapters.ref_processes import Answer, Ask, send
from harness.adapters.ref_rank import RefRank
from harness.transports.mooncake import MooncakeTransport
from harness.transports.nixl import NixlTransport
from harness.transports.staged import Staged
from harness.transports.tcp import TcpTransport
from kvshard_ref.group import TorchGroup
from kvshard_ref.transport import Transport

TRANSPORTS: Mapping[str, Callable[[str, Path], Transport]] = MappingProxyType(
    {
        "tcp": TcpTransport,
        "nixl": NixlTransport,
        "mooncake": MooncakeTransport,
        "staged": lambda name, book: Staged(TcpTransport(name, book)),
    }
)
"""Name of a transport -> what makes an end from its name and the folder of addresses.

`staged` is what ranks on a GPU do, tried without one.
"""


def main() -> None:
    """Joins the process group and serves."""
    rank, ranks, backend, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up between the answers
    device = "cpu"
    if backend == "nccl":
        gpu = rank % torch.cuda.device_count()  # ranks share one where NCCL_MULTI_RANK_GPU_ENABLE=1 lets NCCL
        torch.cuda.set_device(gpu)
        device = f"cuda:{gpu}"
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    group = TorchGroup(device=device)
    group.minimum([rank])  # every pair is connected before the first op is timed
    send(pipe, Answer())
    try:
        serve(sys.stdin.buffer, pipe, group, device)
    finally:
        dist.destroy_process_group()


def serve(asks: BinaryIO, pipe: BinaryIO, group: TorchGroup, device: str) -> None:
    """Answers until the pipe ends."""
    sessions: dict[int, RefRank] = {}
    while (head := asks.read(8)) and len(head) == 8:
        ask = msgspec.msgpack.decode(asks.read(int.from_bytes(head, "little")), type=Ask)
        try:
            send(pipe, answered(ask, sessions, group, device))
        except BrokenPipeError:
            return
        except Exception as error:  # noqa: BLE001  # it is told to the parent
            send(pipe, Answer(error=f"{type(error).__name__}: {error}"))


def answered(ask: Ask, sessions: dict[int, RefRank], group: TorchGroup, device: str) -> Answer:
    """Carries out one ask."""
    if ask.verb == "open" and ask.config is not None:
        end = partial(own_end, ask, rank_name(group.rank), device)
        connect = end if ask.book and sends(ask.config, group.rank) else None
        module = late_device(group.rank, device)
        rank = RefRank(ask.config, group, ask.ways, device, device_module=module, transport=connect)
        sessions[ask.session] = rank
    elif ask.verb == "apply" and ask.op is not None:
        return Answer(reply=sessions[ask.session].apply(ask.op))
    elif ask.verb == "view":
        return Answer(view=sessions[ask.session].view())
    elif ask.verb == "close":
        sessions.pop(ask.session).close()
    return Answer()


def own_end(ask: Ask, name: str, device: str) -> Transport:
    """A new end of this rank; the transports know memory of the CPU alone."""
    end = TRANSPORTS[ask.transport](name, Path(ask.book))
    return end if device == "cpu" else Staged(end)


if __name__ == "__main__":
    main()

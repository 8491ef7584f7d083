"""What a host can run: facts of the host, and what each way of running needs of them.

Rules of the sharding modes: sglang 0.5.23, its launch gate and the processors that its attention kernels are made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

SGLANG = ("0.5.23", "0.5.22")  # that the adapter knows
FA3_GQA, FA3_MLA, TRTLLM_MLA, TRTLLM_DSA = (8, 9), (9,), (10, 12), (10,)  # majors of the compute capability


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Library:
    """A package: its version, "" when it is not installed, and why it cannot be used, "" when it can."""

    version: str
    why: str


@dataclass(frozen=True, slots=True)
class Host:
    """What was found. `links`: pairs of GPUs that read each other's memory, not only through the host's."""

    python: str
    system: str
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    links: frozenset[tuple[int, int]] = frozenset()
    driver: str = ""
    nccl: str = ""
    gloo: bool = False
    libraries: Mapping[str, Library] = field(default_factory=dict)


Lacks = Callable[[Host], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Way:
    """Something to run. `lacks` yields what is missing, each with what to do about it."""

    name: str
    does: str
    lacks: Lacks


def need(*names: str) -> Lacks:
    """These packages, usable."""

    def lacks(host: Host) -> Iterator[str]:
        for name in names:
            library = host.libraries.get(name, Library("", "not looked for"))
            if library.why:
                yield f"{name} {library.version}".strip() + f": {library.why}"

    return lacks


def gpus(count: int, majors: Sequence[int] = ()) -> Lacks:
    """So many GPUs, of these majors of the compute capability if any are given."""

    def lacks(host: Host) -> Iterator[str]:
        if len(host.gpus) < count:
            told = "look at nvidia-smi, CUDA_VISIBLE_DEVICES and torch's build"
            yield f"GPUs: {len(host.gpus)} found, {count} needed; {told}"
        for index, gpu in enumerate(host.gpus[:count]):
            if majors and gpu.capability[0] not in majors:
                wanted = " or ".join(f"{major}.x" for major in majors)
                found = "{}.{}".format(*gpu.capability)
                yield f"GPU {index} ({gpu.name}) has compute capability {found}, {wanted} is needed"

    return lacks


def _nccl(host: Host) -> Iterator[str]:
    if not host.nccl:
        yield "NCCL: this torch has none; install a CUDA build of it"


def _gloo(host: Host) -> Iterator[str]:
    if not host.gloo:
        yield "Gloo: this torch has none; install a build with torch.distributed"


def _sglang(host: Host) -> Iterator[str]:
    yield from need("sglang")(host)
    version = host.libraries.get("sglang", Library("", "")).version
    if version and version not in SGLANG:
        yield f"sglang {version}, {' or '.join(SGLANG)} is needed"


def _carrier(*names: str) -> Lacks:
    """One of these transfer libraries."""

    def lacks(host: Host) -> Iterator[str]:
        missing = [why for name in names for why in need(name)(host)]
        if len(missing) == len(names):
            yield "a transfer library: " + "; ".join(missing)

    return lacks


def every(*parts: Lacks) -> Lacks:
    """All of these."""

    def lacks(host: Host) -> Iterator[str]:
        for part in parts:
            yield from part(host)

    return lacks


SERVE = need("torch", "fastapi", "uvicorn", "prometheus-client", "tokenizers", "safetensors")
PAIR = every(_sglang, _nccl)

WAYS: tuple[Way, ...] = (
    Way("ref", "cases on the reference in this process: kvshard run ref", need("torch", "hypothesis")),
    Way("ref-gloo", "its ranks as processes: ref?group=gloo&shards=N", every(need("torch"), _gloo)),
    Way("ref-nccl", "its ranks on GPUs: ref?group=nccl&shards=2", every(need("torch"), gpus(2), _nccl)),
    Way("nixl", "transfers through NIXL: ref?transport=nixl", need("nixl")),
    Way("mooncake", "transfers through Mooncake: ref?transport=mooncake", need("mooncake")),
    Way("servers", "P1/D1 and P2/D2 on CPUs: kvshard up fixtures/topologies/p2d2_small.toml", every(SERVE, _gloo)),
    Way("servers-gpu", "P1/D1 on a GPU: kvshard up fixtures/topologies/p1d1_gpu.toml", every(SERVE, gpus(1))),
    Way("router", "the router of sglang before servers", need("sglang-router")),
    Way("gates", "accuracy gates through lm-eval: kvshard gate run", need("lm-eval", "scipy")),
    Way("sglang", "sglang's own components without a GPU: kvshard run sglang", _sglang),
    Way(
        "sglang-gqa-cp",
        "sglang P2/D2, GQA sharded over attention CP, fa3",
        every(gpus(4, FA3_GQA), PAIR, _carrier("nixl", "mooncake")),
    ),
    Way(
        "sglang-mla-tp",
        "sglang P2/D2, MLA sharded over attention TP, fa3 or trtllm_mla",
        every(gpus(4, (*FA3_MLA, *TRTLLM_MLA)), PAIR, _carrier("nixl", "mooncake")),
    ),
    Way(
        "sglang-dsa-cp",
        "sglang P2/D2, DSA sharded over attention CP, trtllm kernels, Mooncake only",
        every(gpus(4, TRTLLM_DSA), PAIR, _carrier("mooncake")),
    ),
)

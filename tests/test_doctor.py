"""What a host can run: rules on hosts that are made up, and one look at this one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness import doctor_probe
from harness.adapters.sglang_install import RELEASES
from harness.cli import main
from harness.doctor import SGLANG, WAYS, Gpu, Host, Library

register_cpu_ci(est_time=12, stage="commit", runner="ubuntu-latest")

GOOD = {name: Library(SGLANG[0] if name == "sglang" else "1.0", "") for name in doctor_probe.PACKAGES}
HOPPER, BLACKWELL, AMPERE, CONSUMER = (Gpu("a GPU", (major, 0), 2**37) for major in (9, 10, 8, 12))


def host(*gpus: Gpu, **more: object) -> Host:
    """A host with these GPUs, all linked, and every package."""
    whole = Host(
        "3.11", "Linux", 8, 2**35, gpus, frozenset(combinations(range(len(gpus)), 2)), "580", "2.28", True, GOOD
    )
    return replace(whole, **more)  # type: ignore[arg-type]  # the caller names fields


def runs(one: Host) -> set[str]:
    """The ways that lack nothing."""
    return {way.name for way in WAYS if not list(way.lacks(one))}


def why(one: Host, name: str) -> list[str]:
    """What a way lacks."""
    return next(list(way.lacks(one)) for way in WAYS if way.name == name)


ON_CPU = {"ref", "ref-gloo", "nixl", "mooncake", "servers", "router", "gates", "sglang"}
ON_GPUS = ON_CPU | {"ref-nccl", "servers-gpu"}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([], ON_CPU),
        ([HOPPER], ON_CPU | {"servers-gpu"}),
        ([HOPPER] * 2, ON_GPUS),
        ([HOPPER] * 4, ON_GPUS | {"sglang-gqa-cp", "sglang-mla-tp"}),
        ([BLACKWELL] * 4, ON_GPUS | {"sglang-mla-tp", "sglang-dsa-cp"}),
        ([AMPERE] * 4, ON_GPUS | {"sglang-gqa-cp"}),
        ([CONSUMER] * 4, ON_GPUS | {"sglang-mla-tp"}),
    ],
)
def test_what_gpus_allow(gpus: list[Gpu], expected: set[str]) -> None:
    """The number of GPUs and their generation decide which sharding modes of sglang there are."""
    assert expected == runs(host(*gpus, nccl="2.28" if gpus else ""))


def test_what_is_missing_is_named() -> None:
    """A reason has what was found, what is needed, and the place."""
    assert ["GPU 0 (a GPU) has compute capability 9.0, 10.x is needed"] == why(host(*[HOPPER] * 4), "sglang-dsa-cp")[:1]
    assert ["sglang 0.5.19, 0.5.23 or 0.5.22 is needed"] == why(
        host(libraries=GOOD | {"sglang": Library("0.5.19", "")}), "sglang"
    )
    broken = GOOD | {"mooncake": Library("0.3", "libibverbs.so.1: cannot open shared object file")}
    assert ["mooncake 0.3: libibverbs.so.1: cannot open shared object file"] == why(host(libraries=broken), "mooncake")
    assert [] == why(host(*[HOPPER] * 4, libraries=broken), "sglang-gqa-cp")  # NIXL is there
    assert 1 == len(why(host(*[BLACKWELL] * 4, libraries=broken), "sglang-dsa-cp"))  # Mooncake only
    assert ["Gloo: this torch has none; install a build with torch.distributed"] == why(host(gloo=False), "ref-gloo")


def test_versions_are_those_of_the_adapter() -> None:
    """What the doctor takes for sglang is what the adapter has names for."""
    assert tuple(RELEASES) == SGLANG


def test_links(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that do not read each other's memory are told, on one line; they can be used, NCCL goes through the host."""
    monkeypatch.setenv("COLUMNS", "40")
    islands = host(*[HOPPER] * 4, links=frozenset({(0, 1), (2, 3)}))
    monkeypatch.setattr("harness.doctor_cli.probe", lambda: islands)
    main(["doctor"])
    lines = [line.split("9.0")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("GPU 1")]

    assert [", reads GPU 0, GPU 2, 3 only through the host"] == lines
    assert runs(host(*[HOPPER] * 4)) == runs(islands)


MODULES = {
    "good": "",
    "broken": "raise OSError('libx.so: not found')",
    "silent": "raise SystemExit(3)",
    "slow": "import time; time.sleep(60)",
}


def test_a_library_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package is there only when an import of it works; what it says is the reason; one that hangs hangs nobody."""
    for name, text in MODULES.items():
        (tmp_path / f"odd_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor_probe, "IMPORT_SECONDS", 3)
    packages = {name: doctor_probe.Package(("pytest",), (f"odd_{name}",), "buy it") for name in MODULES}
    packages["either"] = doctor_probe.Package(("no-such-one", "pytest"), ("odd_broken", "odd_good"), "buy it")
    packages["none"] = doctor_probe.Package(("no-such-one",), ("odd_good",), "buy it")
    monkeypatch.setattr(doctor_probe, "PACKAGES", packages)
    version = pytest.__version__

    assert {
        "good": Library(version, ""),
        "either": Library(version, ""),
        "none": Library("", "not installed; buy it"),
        "broken": Library(version, "OSError: libx.so: not found"),
        "silent": Library(version, "import odd_silent ends with code 3"),
        "slow": Library(version, "import odd_slow takes more than 3 s"),
    } == {name: doctor_probe.library(name) for name in packages}


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways without names, exit code 0; with names only those, and 1 when one lacks something; JSON for programs."""
    monkeypatch.setattr("harness.doctor_cli.probe", lambda: host(HOPPER))

    assert 0 == main(["doctor"])
    shown = capsys.readouterr().out
    assert [way.name for way in WAYS if way.name not in shown] == []
    assert "GPU 0: a GPU, 128 GiB, capability 9.0" in shown
    assert [0, 1] == [main(["doctor", "servers-gpu"]), main(["doctor", "servers-gpu", "ref-nccl"])]
    capsys.readouterr()
    assert 1 == main(["doctor", "--json", "ref-nccl"])
    told = json.loads(capsys.readouterr().out)
    assert ["ref-nccl"] == list(told["ways"])
    assert told["ways"]["ref-nccl"][0].startswith("GPUs: 1 found, 2 needed")
    assert 3 == main(["doctor", "ref-ncl"])
    assert "'ref-ncl'; did you mean 'ref-nccl'?" in capsys.readouterr().err


def test_this_host() -> None:
    """This host is looked at without an error, and what these tests themselves need is found."""
    found = doctor_probe.probe()

    assert ["", ""] == [found.libraries[name].why for name in ("torch", "hypothesis")]
    assert {"ref", "ref-gloo"} <= runs(found)
    assert found.cores >= 1

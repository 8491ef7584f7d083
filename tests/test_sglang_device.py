"""The stand-ins for device, group and package under the sglang adapter; none of them needs sglang."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from ci.register import register_cpu_ci
from harness.adapters import sglang_install
from harness.adapters.sglang_device import LazyDevice
from harness.adapters.sglang_hub import Communicator, LazyGroup, ShardGroup
from harness.adapters.sglang_standins import RankDevices
from harness.lockstep import CollectiveMismatch, Lockstep
from harness.usage import UserError

register_cpu_ci(est_time=20, stage="commit")


class TestDevice:
    def test_first_stream_runs_at_once(self) -> None:
        """Work of the first stream has run when it is issued."""
        device, ran = LazyDevice(0), list[str]()
        device.issue(lambda: ran.append("work"))
        assert ["work"] == ran

    def test_other_streams_wait(self) -> None:
        """Work of another stream runs when an event behind it is waited for, and in order."""
        device, ran = LazyDevice(0), list[int]()
        other, ready = device.Stream(), device.Event()
        with device.stream(other):
            device.issue(lambda: ran.append(1))
            device.issue(lambda: ran.append(2))
            ready.record()
            device.issue(lambda: ran.append(3))
        before = list(ran)
        device.current_stream().wait_event(ready)
        assert ([], [1, 2]) == (before, ran)

    def test_events_are_late(self) -> None:
        """An event with pending work answers no at some looks, then yes; its work has run by then."""
        device, ran = LazyDevice(1), list[str]()
        for _ in range(2):  # the first event of rank 1 is late by one look
            event = device.Event()
            with device.stream(device.Stream()):
                device.issue(lambda: ran.append("work"))
                event.record()
            looks = 1
            while not event.query():
                looks += 1
            assert (looks > 1, ["work"]) == (True, ran)
            ran.clear()


class TestGroup:
    def test_rows_come_with_the_wait(self) -> None:
        """Rows of other ranks arrive when the event behind the gather is waited for, on every rank."""
        with Lockstep(3) as lockstep:

            def program(rank: int, _: object) -> tuple[list[int], list[int]]:
                device = LazyDevice(rank)
                group = LazyGroup(device, lockstep.groups[rank])
                out = torch.full((3,), -1)
                stream, ready = device.Stream(), device.Event()
                with device.stream(stream):
                    Communicator(group, "cpu").all_gather(out, torch.tensor([rank]))
                    ready.record(stream)
                before = out.tolist()
                device.current_stream().wait_event(ready)
                return before, out.tolist()

            assert [([-1, -1, -1], [0, 1, 2])] * 3 == lockstep.run(program)

    def test_differing_gathers(self) -> None:
        """A rank that gathers another shape is an error that names both."""
        with Lockstep(2) as lockstep:

            def program(rank: int, _: object) -> None:
                group = LazyGroup(LazyDevice(rank), lockstep.groups[rank])
                group.all_gather(torch.zeros(2 + 2 * rank), torch.zeros(1 + rank))

            with pytest.raises(CollectiveMismatch, match="out"):
                lockstep.run(program)

    def test_shard_group(self) -> None:
        """A pool finds rank and size of its shard group."""
        with Lockstep(2) as lockstep:
            group = ShardGroup(LazyGroup(LazyDevice(1), lockstep.groups[1]))
            assert (2, 1) == (group.world_size, group.rank_in_group)

    def test_devices_by_rank(self) -> None:
        """Code that asks for the device of the process gets that of the rank that runs."""
        devices = RankDevices()
        with Lockstep(2) as lockstep:

            def program(rank: int, _: object) -> bool:
                device = LazyDevice(rank)
                with devices.of(device):
                    lockstep.groups[rank].minimum([0])  # lets the other rank in
                    return devices.current_stream() is device.current_stream()

            assert [True, True] == lockstep.run(program)


class TestInstall:
    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without sglang the message names the version that is expected and the command that installs it."""

        def version(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        with pytest.raises(
            UserError, match=r"sglang is not installed; expected version 0\.5\.23 or 0\.5\.22: pip install"
        ):
            sglang_install.installed()

    def test_other_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A release without a table is named, with those that have one."""
        monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.4.0")
        with pytest.raises(UserError, match=r"sglang 0\.4\.0 is installed; expected version 0\.5\.23"):
            sglang_install.installed()

    def test_missing_name(self) -> None:
        """A name that a release lacks is told with its module, the version and the table to correct."""
        with pytest.raises(UserError, match=r"sglang 0\.0\.1: json has no nonesuch, .*sglang_install\.py"):
            sglang_install.name_of("0.0.1", "json", "nonesuch")

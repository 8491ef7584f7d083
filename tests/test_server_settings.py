"""Launch flags of a server, with sglang's names: what cannot work is refused with flag, value and reason."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.adapters.ref_process import TRANSPORTS
from harness.adapters.ref_server import BACKENDS
from harness.cli import main
from kvshard_ref.server.settings import CHOICES, HELP, Settings, SettingsError, add_flags, settings_of

register_cpu_ci(est_time=10, stage="commit")

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "fixtures" / "model")
BASE = ["--model-path", MODEL, "--load-format", "dummy"]
PREFILL = ["--disaggregation-mode", "prefill"]
SHARDED = [*PREFILL, "--enable-kv-cache-sharding"]


def parsed(*flags: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return settings_of(parser.parse_args([*BASE, *flags]), ("tcp", "nixl"))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--tp-size", "2"],
        [*PREFILL, "--attn-cp-size", "4", "--cp-strategy", "zigzag"],
        [*SHARDED, "--attn-cp-size", "2", "--tp-size", "2"],
        [*SHARDED, "--attn-cp-size", "2", "--enable-hierarchical-cache", "--speculative-algorithm", "NEXTN"],
        [*SHARDED, "--tp-size", "2", "--hicache-write-policy", "write_back"],
        ["--disaggregation-mode", "decode", "--tp-size", "2"],
    ],
)
def test_what_works_is_taken(flags: list[str]) -> None:
    """Every combination that the reference can serve is accepted, and survives the way to a rank process."""
    settings = parsed(*flags)

    assert Settings.decoded(settings.encoded()) == settings


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp-size", "0"], "--tp-size 0: expected 1 or more"),
        (["--attn-cp-size", "2"], "--attn-cp-size 2: only a prefill worker splits prompts"),
        (["--enable-kv-cache-sharding"], "--enable-kv-cache-sharding True: with --disaggregation-mode null"),
        ([*SHARDED], "--enable-kv-cache-sharding True: needs --attn-cp-size or --tp-size above 1"),
        ([*SHARDED, "--tp-size", "2", "--page-size", "1"], "--page-size 1: with --enable-kv-cache-sharding"),
        (
            [*SHARDED, "--tp-size", "2", "--chunked-prefill-size", "100"],
            "--chunked-prefill-size 100: with --enable-kv-cache-sharding: expected a multiple of --page-size 64",
        ),
        (["--disaggregation-mode", "decode", "--enable-hierarchical-cache"], "--enable-hierarchical-cache True: a"),
        (["--speculative-eagle-topk", "2"], "--speculative-eagle-topk 2: the draft is one chain: expected 1"),
        (["--chunked-prefill-size", "10"], "--chunked-prefill-size 10: expected at least a page of 64 tokens"),
        (["--max-total-tokens", "10"], "--max-total-tokens 10: expected at least a page"),
        (["--disaggregation-transfer-backend", "carrier"], "--disaggregation-transfer-backend carrier: expected"),
        (["--load-format", "auto", "--model-path", "nowhere"], "--model-path nowhere: no tokenizer.json and no "),
        (["--disaggregation-timeout", "0"], "--disaggregation-timeout 0.0: expected more than 0 seconds"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(flags: list[str], says: str) -> None:
    """The error has the flag, its value and the reason."""
    with pytest.raises(SettingsError) as caught:
        parsed(*flags)

    assert str(caught.value).startswith(says)


def test_every_setting_has_a_flag_and_help() -> None:
    """No setting is without a word of help; choices are of settings that exist."""
    assert set(HELP) == {field.name for field in fields(Settings)}
    assert set(CHOICES) <= set(HELP)


def test_a_face_imports_no_torch() -> None:
    """It knows the transports by name alone, which are those that a rank has: a worker is up seconds earlier."""
    code = "import sys, harness.serve_cli; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout

    assert "False\n" == told
    assert tuple(TRANSPORTS) == BACKENDS


def test_pages_of_the_host() -> None:
    """The host tier is the device's pages times the ratio; without the flag there is none."""
    ratio = ["--hicache-ratio", "1.5", "--max-total-tokens", "640"]
    assert parsed(*ratio).host_pages == 0
    assert parsed(*ratio, "--enable-hierarchical-cache").host_pages == 15


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """A user's mistake is one line and exit code 2."""
    code = main(["serve", *BASE, "--enable-kv-cache-sharding"])

    assert code == 2
    assert capsys.readouterr().err.startswith(
        "kvshard: --enable-kv-cache-sharding True: with --disaggregation-mode null"
    )


def test_the_document_lists_every_flag() -> None:
    """docs/server.md has a row for each flag, with its default and its choices."""
    text = (ROOT / "docs" / "server.md").read_text()
    for field in fields(Settings):
        flag, value = "--" + field.name.replace("_", "-"), field.default
        default = "" if isinstance(value, bool) or value == "" else f"`{value}`"
        choices = [choice for choice in CHOICES.get(field.name, ()) if choice]
        told = HELP[field.name] + (f"; one of {', '.join(choices)}" if choices else "")
        assert f"| `{flag}` | {default} | {told} |" in text

"""`pytest suites/accuracy --engine URL`: options of the accuracy gates, and the references that fit the engine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs

import pytest

from harness.gate_conditions import Place, place
from harness.gate_reference import Reference, fitting, missing, references
from harness.usage import UserError

REFERENCES = Path(__file__).parent.parent.parent / "fixtures" / "references.toml"
NEEDS = "an accuracy gate asks a running server: say which, with --engine http://host:port"


class Sought:
    """What a test is about: a reference, or why there is none. Its text is the test's id."""

    def __init__(self, reference: Reference | None, why: str = "", where: Place | None = None) -> None:
        self.reference, self.why, self.where = reference, why, where

    def __str__(self) -> str:
        return "no-reference" if self.reference is None else Path(self.reference.task).stem


def pytest_addoption(parser: pytest.Parser) -> None:
    """Beside those of the plugin."""
    group = parser.getgroup("kvshard accuracy")
    text = f"recorded results (default {REFERENCES.name} of fixtures/)"
    group.addoption("--kvshard-references", metavar="FILE", type=Path, default=REFERENCES, help=text)
    text = "only this task; may be given several times"
    group.addoption("--kvshard-task", metavar="TASK", action="append", default=[], help=text)
    group.addoption("--kvshard-concurrency", metavar="C", type=int, default=8, help="requests in flight (default 8)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each reference that fits; where none does, one that fails and says so."""
    if "sought" in metafunc.fixturenames:
        metafunc.parametrize("sought", _sought(metafunc.config), ids=str)


def _sought(config: pytest.Config) -> list[Sought]:
    url: str | None = config.getoption("engine")
    path: Path = config.getoption("kvshard_references")
    tasks: list[str] = config.getoption("kvshard_task")
    if url is None or not url.startswith(("http://", "https://")):
        return [Sought(None, NEEDS if url is None else f"{url!r}: {NEEDS}")]
    try:
        address, _, options = url.partition("?")
        behind = parse_qs(options)  # a router's card is its own: its workers say what engine they are
        where = place(address, None, 600.0, [*behind.get("prefill", ()), *behind.get("decode", ())])
        engine, model = str(where.info.card.get("owned_by", "")), where.asked.model
        found = fitting(references(path), engine, model, tasks)
    except UserError as error:
        return [Sought(None, str(error))]
    lacking = [task for task in tasks if task not in {each.task for each in found}]
    sought = [Sought(each, where=where) for each in found]
    if lacking or not found:
        sought.append(Sought(None, missing(path, engine, where.url, model, lacking)))
    return sought

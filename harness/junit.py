"""JUnit XML from a record, for CI systems that read nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

from harness.record import Record, RecordError
from harness.result import CaseResult, message
from harness.types import Verdict

# XML 1.0 cannot hold these characters in any form.
_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def tree(record: Record) -> ET.Element:
    """One test case per case. A verdict that proves nothing is an error, never a pass.

    Only a skip and a known failure are skipped.
    """
    counts = record.footer.counts
    suite = ET.Element(
        "testsuite",
        name=_clean(f"kvshard {record.header.engine}"),
        tests=str(len(record.results)),
        failures=str(counts[Verdict.FAIL]),
        errors=str(counts[Verdict.ERROR] + counts[Verdict.UNKNOWN]),
        skipped=str(counts[Verdict.SKIP] + counts[Verdict.KNOWN]),
        time=f"{record.footer.seconds:.3f}",
        timestamp=record.header.started,
    )
    properties = ET.SubElement(suite, "properties")
    head = record.header
    facts = {"engine_version": head.engine_version, "seed": str(head.seed), "budget": head.budget}
    facts["commit"] = head.commit or ""
    facts |= {f"version.{name}": value for name, value in head.versions.items()}
    facts |= {f"engine.{name}": value for name, value in head.engine_options.items()}
    for name, value in facts.items():
        ET.SubElement(properties, "property", name=_clean(name), value=_clean(value))
    for result in record.results:
        _case(suite, result)
    suites = ET.Element("testsuites")
    suites.append(suite)
    return suites


def write(path: Path, record: Record) -> None:
    """Writes the XML of a record. Raises `RecordError` when it cannot."""
    root = tree(record)
    ET.indent(root)
    try:
        path.write_bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error


def _case(suite: ET.Element, result: CaseResult) -> None:
    group = result.case.partition(".")[0]
    case = ET.SubElement(
        suite, "testcase", classname=_clean(f"kvshard.{group}"), name=_clean(result.case), time=f"{result.seconds:.3f}"
    )
    if result.verdict is Verdict.PASS:
        return
    if result.verdict in (Verdict.SKIP, Verdict.KNOWN):
        why = result.why if result.verdict is Verdict.SKIP else f"known failure: {result.why}"
        ET.SubElement(case, "skipped", message=_clean(why))
        return
    tag = "failure" if result.verdict is Verdict.FAIL else "error"
    told = ET.SubElement(case, tag, type=str(result.verdict), message=_clean(result.why))
    told.text = _clean(message(result.failure) if result.failure is not None else result.why)


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)

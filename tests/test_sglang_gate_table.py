"""The table of launch flags and the rules beside it, which need no sglang."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from ci.register import register_cpu_ci
from harness.adapters.sglang_gate import READ_FROM
from harness.adapters.sglang_gate_rules import RULES, agrees, by_the_rules
from harness.adapters.sglang_gate_table import PATH, Reason, Row, expected, launch, load, outcome

register_cpu_ci(est_time=20, stage="commit")

ROOT = Path(__file__).resolve().parent.parent
TABLE = load()
SCRIPTS = sorted(PATH.parent.glob("*.sh"))


class TestTable:
    def test_ids(self) -> None:
        """No two rows have one id."""
        assert [] == [id_ for id_, times in Counter(row.id for row in TABLE.row).items() if times > 1]

    def test_no_row_twice(self) -> None:
        """No two rows ask the same."""
        asked = Counter(repr(launch(TABLE, row)) for row in TABLE.row)
        assert [] == [question for question, times in asked.items() if times > 1]

    def test_every_reason_has_a_row(self) -> None:
        """Each reason of the table is what some row expects, and each warning too."""
        refused = {row.refuse for row in TABLE.row} - {""}
        warned = {id_ for row in TABLE.row for id_ in row.warn}
        assert (set(TABLE.reason), set(TABLE.warning)) == (refused, warned)

    def test_reasons_are_distinct(self) -> None:
        """No text of a reason is a part of another."""
        texts = [reason.text for reason in TABLE.reason.values()]
        assert [] == [(one, other) for one in texts for other in texts if one != other and one in other]

    def test_commands_are_all_there(self) -> None:
        """Each script has its line in the table, and the other way round."""
        assert [script.name for script in SCRIPTS] == sorted(command.file for command in TABLE.command)

    def test_release(self) -> None:
        """Table and adapter were read from one release."""
        assert READ_FROM == TABLE.release

    def test_row_without_an_outcome(self) -> None:
        """A row has exactly one outcome."""
        with pytest.raises(ValueError, match="expected one of accept, refuse and adjust"):
            expected(Row(id="a", base="mla", source="", accept=True, refuse="mode"))

    def test_lines(self) -> None:
        """The lines of a reason are the first, the last and those between."""
        places = ("f.py:98", "f.py:99", "f.py:104", "f.py:105", "")
        assert [False, True, True, False, False] == [Reason("", "99-104").holds(where) for where in places]


class TestRules:
    def test_ids(self) -> None:
        """Each reason has its rule."""
        assert set(TABLE.reason) == set(RULES)

    @pytest.mark.parametrize("row", TABLE.row, ids=lambda row: row.id)
    def test_row(self, row: Row) -> None:
        """The rules say of each row what the table says."""
        ruled, wanted = by_the_rules(launch(TABLE, row)), expected(row, row.warn)
        assert agrees(ruled, wanted), f"rules {ruled}, table {wanted}"

    def test_accepted_is_no_refusal(self) -> None:
        """To accept what a rule refuses is no agreement, nor to refuse what none does."""
        refused, accepted = outcome("mode", {}, ()), outcome("", {}, ())
        assert (False, False, False) == (
            agrees(refused, accepted),
            agrees(accepted, refused),
            agrees(refused, outcome("dllm", {}, ())),
        )


class TestShell:
    @pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
    def test_script(self, script: Path) -> None:
        """Each launch command is shell."""
        assert "" == syntax(script.read_text(encoding="utf-8"))

    def test_document(self) -> None:
        """So is what the page about them shows."""
        text = (ROOT / "docs" / "sglang_launch_gate.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        assert (True, [""] * len(blocks)) == (len(blocks) > 0, [syntax(block) for block in blocks])

    def test_syntax_is_checked(self) -> None:
        """What is no shell is told."""
        assert "" != syntax("exec python3 --port $(")


def syntax(text: str) -> str:
    return subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False).stderr

from __future__ import annotations

import time

import pytest

from ci.comment_parse import TEXT_MAX, Command, Refusal, parse, shown
from ci.comment_reply import DONE, STATE, Action, Reply, body, marker, read_reply
from ci.register import register_cpu_ci

register_cpu_ci(est_time=10, stage="commit")


class TestParse:
    def test_half_a_line_is_not_read(self) -> None:
        """A command that the limit cuts in two is not carried out in part."""
        text = "x" * (TEXT_MAX - 30) + "\n/rerun-test test_a.py test_b.py test_c.py"
        assert () == parse(text).commands

    def test_lines(self) -> None:
        """A command knows its line, with any end of line."""
        assert (Command("rerun-failed-ci", line=3),) == parse("a\r\nb\r\n/rerun-failed-ci").commands

    def test_as_typed(self) -> None:
        """A command's text is what could be typed."""
        [command] = parse("/rerun-test   `test_a.py`  --changed").commands
        assert "/rerun-test -c test_a.py" == command.text

    @pytest.mark.parametrize(
        "text", ["/rerun-test " + "*" * 190, "/" * 20_000, "`" * 20_000, "<!--" * 5000, "/rerun-test " + "[" * 190]
    )
    def test_no_text_takes_long(self, text: str) -> None:
        """Texts made to be slow are read within a second."""
        start = time.process_time()
        parse(text)
        assert time.process_time() - start < 1


class TestShown:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("a`b", "a'b"),
            ("a\u202eb", "a<U+202E>b"),
            ("a\nb", "a<U+000A>b"),
            ("\ud800", "<U+D800>"),
            ("x" * 121, "x" * 120 + "..."),
        ],
    )
    def test_harmless(self, text: str, expected: str) -> None:
        """No back-tick, line end, invisible character or endless text gets into a code span."""
        assert expected == shown(text)


class TestReply:
    def reply(self, **values: object) -> Reply:
        made = Reply(7, 41, "writer", "2026-06-01T12:00:00Z", "a" * 40, DONE, asked=["/rerun-test --changed -->"])
        for name, value in values.items():
            setattr(made, name, value)
        return made

    def test_round_trip(self) -> None:
        """State is read back as it was, though it holds what would end a comment of HTML."""
        made = self.reply(actions=[Action("dispatch", "41/7/writer/0", "--> x", commands=[["a", "--b"]])])
        made.refusals.append(("<!-- -->", "--", "---->"))
        text = body(made)
        assert "-->" not in text.rpartition(STATE)[2].removesuffix(" -->")
        made.identity = 5
        assert made == read_reply({"id": 5, "body": text.replace("\n", "\r\n")})

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "hello",
            marker(7),
            f"{marker(7)}\n{STATE}{{}} -->",
            f"{marker(7)}\n{STATE}[1] -->",
            f"{marker(7)}\n{STATE}{{ -->",
        ],
    )
    def test_damaged(self, text: str) -> None:
        """A damaged reply is none."""
        assert read_reply({"id": 5, "body": text}) is None

    def test_other_comment(self) -> None:
        """A reply whose first line names another comment than its state is none."""
        assert read_reply({"id": 5, "body": body(self.reply()).replace(marker(7), marker(8))}) is None

    def test_long(self) -> None:
        """A reply with very many long commands is shortened to what GitHub takes."""
        commands = [["python3", "-m", "pytest", "-x", f"suites/{'x' * 190}{number:03}.py"] for number in range(100)]
        actions = [Action("dispatch", f"41/7/writer/{at}", "ubuntu-latest", commands=commands[at::2]) for at in (0, 1)]
        made = self.reply(actions=actions)
        made.refuse([Refusal("w" * 120, "y" * 300, "a" * 300)] * 100)
        made.note(["n" * 300] * 100)
        text = body(made)
        assert len(text) < 65_536
        assert made == read_reply({"id": 0, "body": text})
        assert "and 80 more that were refused" in text

"""Comment text -> commands. A command is a line that begins with it, outside code fences, quotes and HTML comments.

Nothing here knows files or rights. A line with something wrong in it is refused as a whole, with advice, so that a
part of it never runs. Whatever passes is made of the characters of `SPEC` alone.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

TEXT_MAX = 20_000  # characters of a comment that are read
COMMANDS_MAX = 5  # of one comment
LINE_MAX = 4_000  # characters of a command's line
SPECS_MAX = 50  # of one command
SPEC_MAX = 200  # characters
SHOWN_MAX = 120

SPEC = re.compile(r"[A-Za-z0-9_./:*?\[\]-]+")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
WORD = re.compile(r"/([A-Za-z][A-Za-z0-9_-]*)(?=\s|$)")
PARTS = re.compile(r"(?P<path>[^:]+)(?:::(?P<tests>[A-Za-z_]\w*(?:(?:\.|::)[A-Za-z_]\w*)?))?", re.ASCII)
FENCE = re.compile(r" {0,3}(?P<marks>`{3,}|~{3,})(?P<rest>.*)")
GLOB_CHARACTERS = frozenset("*?[]")
BACKTICK_OR_QUOTE = frozenset("`'\"")
NAMESPACES = ("rerun", "run-", "tag-")  # silence on a word of these would look as if nobody listened

COMMANDS = ("rerun-test", "rerun-failed-ci", "rerun-group", "tag-run-ci-label", "tag-and-rerun-ci")
RETIRED: Mapping[str, str] = MappingProxyType(
    {
        "rerun-stage": "a stage cannot be run alone any more; `/rerun-test` runs files, `/rerun-failed-ci` what failed",
        "run-full-ci": "it is `/tag-and-rerun-ci` now",
        "rerun-full-ci": "it is `/tag-and-rerun-ci` now",
        "run-extra-ci": "it is `/tag-and-rerun-ci extra` now",
        "rerun-extra-ci": "it is `/tag-and-rerun-ci extra` now",
    }
)
ADVICE_CHARACTERS = "letters, digits and `_ . / : - * ? [ ]` may stand in an argument; nothing else reaches a runner"


class Command(NamedTuple):
    """One command that is well formed."""

    name: str
    arguments: tuple[str, ...] = ()
    changed: bool = False  # -c: the changed test files as well
    line: int = 1

    @property
    def text(self) -> str:
        """As it could be typed."""
        return " ".join([f"/{self.name}", *(["-c"] if self.changed else []), *self.arguments])


class Refusal(NamedTuple):
    """What is not done, why, and what to do instead; all three are safe to show."""

    what: str
    why: str
    advice: str


class Parsed(NamedTuple):
    """What a comment asks for."""

    commands: tuple[Command, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class Bad(Exception):  # noqa: N818 - a refusal on its way up
    """Why a line is refused, and the advice."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.why, self.advice = why, advice


def shown(text: str, longest: int = SHOWN_MAX) -> str:
    """Foreign text made harmless for a code span: what cannot be seen is named, back-ticks become quotes."""
    cut = text if len(text) <= longest else text[:longest] + "..."
    return "".join("'" if c == "`" else c if c.isprintable() else f"<U+{ord(c):04X}>" for c in cut)


def parse(text: str) -> Parsed:
    """All commands of a comment and all refusals, in order; neither where there is nothing to do."""
    commands: list[Command] = []
    refusals: list[Refusal] = []
    kept = text if len(text) <= TEXT_MAX else text[:TEXT_MAX].rpartition("\n")[0]  # no half of a line is read
    for number, line in spoken_lines(kept):
        word = WORD.match(visible(line))
        if word is None or not is_owned(word[1]):
            continue
        try:
            command = read_command(word[1], line, number)
        except Bad as bad:
            refusals.append(Refusal(shown(line), bad.why, bad.advice))
            continue
        if all(command[:3] != other[:3] for other in commands):
            commands.append(command)
    if (commands or refusals) and len(text) > TEXT_MAX:
        why = f"the comment has {len(text)} characters"
        refusals.append(Refusal("the rest of the comment", why, f"only the first {TEXT_MAX} are read"))
    if len(commands) > COMMANDS_MAX:
        why = f"{len(commands)} commands in one comment, {COMMANDS_MAX} are taken"
        refusals += [Refusal(shown(c.text), why, "write another comment") for c in commands[COMMANDS_MAX:]]
    return Parsed(tuple(commands[:COMMANDS_MAX]), tuple(refusals[: 2 * COMMANDS_MAX]))


def spoken_lines(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that are the commenter's own words: no fence, no HTML comment."""
    fence, hidden = "", False
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark["marks"].startswith(fence) and not mark["rest"].strip():
                fence = ""
        elif hidden:
            hidden = "-->" not in line
        elif mark and not (mark["marks"][0] == "`" and "`" in mark["rest"]):
            fence = mark["marks"]
        else:
            hidden = "<!--" in line and "-->" not in line.rpartition("<!--")[2]
            yield number, line


def is_owned(word: str) -> bool:
    """Whether a word after a slash is meant for this handler."""
    name = word.lower()
    return name.startswith(NAMESPACES) or name in RETIRED or bool(nearest(name, 0.75))


def nearest(name: str, cutoff: float = 0.6) -> str:
    """The command that is most like it; empty when none is."""
    return next(iter(difflib.get_close_matches(name, [*COMMANDS, *RETIRED], 1, cutoff)), "")


def is_invisible(character: str) -> bool:
    """Whether it shows nothing, turns the direction of text, or looks like a plain blank without being one."""
    category = unicodedata.category(character)
    return character not in " \t" and (category[0] == "C" or category in {"Zl", "Zp", "Zs"})


def visible(line: str) -> str:
    """The line as a reader sees it: blanks of all kinds are blanks, characters that look alike are one."""
    seen = (" " if c.isspace() else c for c in line if not is_invisible(c) or c.isspace())
    return unicodedata.normalize("NFKC", "".join(seen))


def read_command(word: str, line: str, number: int) -> Command:
    """The command of a line; raises `Bad`."""
    name = word.lower()
    if len(line) > LINE_MAX:
        raise Bad(f"the line has {len(line)} characters", f"at most {LINE_MAX}; name a folder or a glob instead")
    for at, character in enumerate(line, 1):
        if is_invisible(character):
            what = unicodedata.name(character, "no name")
            why = f"invisible character U+{ord(character):04X} ({what}) at column {at}"
            raise Bad(why, "it often comes along with copied text; type the line by hand")
    if not line.startswith(f"/{word}"):
        raise Bad("its letters only look like those of a command", "type the line by hand")
    if name in RETIRED:
        raise Bad(f"`/{name}` is retired", RETIRED[name])
    if word not in COMMANDS:
        near = nearest(name)
        advice = f"did you mean `/{near}`?" if near and near not in RETIRED else f"there are {all_commands()}"
        raise Bad(f"there is no command `/{shown(word, 40)}`", advice)
    return ARGUMENTS[word](word, line.split()[1:], number)


def all_commands() -> str:
    """The commands, for a sentence."""
    return ", ".join(f"`/{name}`" for name in COMMANDS)


def read_test(name: str, words: list[str], number: int) -> Command:
    """`/rerun-test [-c] SPEC...`."""
    if len(words) > SPECS_MAX:
        raise Bad(f"{len(words)} arguments, {SPECS_MAX} at most", "name a folder or a glob instead")
    options = {word for word in words if word.startswith("-")}
    specs = tuple(dict.fromkeys(read_spec(word) for word in words if word not in options))
    if unknown := sorted(options - {"-c", "--changed"}):
        raise Bad(f"there is no option `{shown(unknown[0])}`", "`-c` or `--changed` is the only one")
    if not specs and not options:
        raise Bad("it names no test", "`/rerun-test test_cache.py` runs a file, `/rerun-test -c` the changed ones")
    return Command(name, specs, bool(options), number)


def read_spec(word: str) -> str:
    """One argument that names tests, without the quotes or back-ticks around it; raises `Bad`."""
    if len(word) > 2 and word[0] == word[-1] and word[0] in BACKTICK_OR_QUOTE:
        word = word[1:-1]
    if len(word) > SPEC_MAX:
        raise Bad(f"an argument of {len(word)} characters", f"at most {SPEC_MAX}")
    if not SPEC.fullmatch(word):
        wrong = next(character for character in word if not SPEC.fullmatch(character))
        raise Bad(f"the character `{shown(wrong)}` in `{shown(word)}`", ADVICE_CHARACTERS)
    parts = PARTS.fullmatch(word)
    if parts is None:
        raise Bad(f"`{shown(word)}` is no test", "`FILE::Class.method`, `FILE::Class` and `FILE::function` are")
    check_path(parts["path"])
    if parts["tests"] and GLOB_CHARACTERS & set(word):
        raise Bad(f"`{shown(word)}` is a glob with `::`", "a glob names files; name one file for `::`")
    return word


def check_path(path: str) -> None:
    """A path stays within the repository; raises `Bad`."""
    if path.startswith(("/", "-")) or ".." in path.split("/"):
        why = f"`{shown(path)}` leads out of the repository"
        raise Bad(why, "a path begins at the repository's root or in a test folder")
    if any(part in {"", "."} for part in path.removesuffix("/").split("/")):
        raise Bad(f"`{shown(path)}` has an empty or `.` part", "write the plain path, as in `suites/e2e/test_cache.py`")


def read_group(name: str, words: list[str], number: int) -> Command:
    """`/rerun-group NAME`."""
    if len(words) != 1:
        raise Bad(f"{len(words)} names of groups", "`/rerun-group NAME` takes one")
    if not NAME.fullmatch(words[0]) or len(words[0]) > SPEC_MAX:
        raise Bad(f"`{shown(words[0])}` is no name of a group", ADVICE_CHARACTERS)
    check_path(words[0])
    return Command(name, (words[0],), line=number)


def read_tag(name: str, words: list[str], number: int) -> Command:
    """`/tag-run-ci-label [extra]` and `/tag-and-rerun-ci [extra]`."""
    if words not in ([], ["extra"]):
        raise Bad(f"`{shown(' '.join(words))}` says nothing here", "`extra` is the only word that may follow")
    return Command(name, tuple(words), line=number)


def read_failed(name: str, words: list[str], number: int) -> Command:  # noqa: ARG001 - called as the others are
    """`/rerun-failed-ci`; words behind it say nothing, people add them to make a new comment."""
    return Command(name, line=number)


ARGUMENTS = MappingProxyType(
    {
        "rerun-test": read_test,
        "rerun-failed-ci": read_failed,
        "rerun-group": read_group,
        "tag-run-ci-label": read_tag,
        "tag-and-rerun-ci": read_tag,
    }
)

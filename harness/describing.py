"""`kvshard describe`: a case or an engine in words; without a name, every case. --markdown is docs/invariants.md.

Exit codes: 0 described, 3 there is no such case or engine.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable

from harness import markdown
from harness.capabilities import CAPABILITIES, OP_SENTENCES, PROMISE_SENTENCES, SNAPSHOT_SENTENCES
from harness.case import Case
from harness.connect import close, connect, engines, manifest_of
from harness.suite import SUITES, all_cases
from harness.types import Manifest
from harness.usage import UserError, nearest

WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard describe`."""
    parser.add_argument("name", nargs="?", metavar="CASE|ADDRESS", help="a case's id or an engine's address")
    parser.add_argument(
        "--suite", default=SUITES[0], metavar="SUITE", help=f"package, file or folder (default {SUITES[0]})"
    )
    parser.add_argument("--markdown", action="store_true", help="all cases as a page, such as docs/invariants.md")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    if args.markdown and args.name:
        raise UserError(f"--markdown is for all cases, so leave out {args.name!r}")
    sys.stdout.write(text(args.name, args.suite, as_markdown=args.markdown).rstrip("\n") + "\n")
    return 0


def text(name: str | None, suite: str, *, as_markdown: bool = False) -> str:
    """The whole output. Raises `UserError`."""
    if name is not None and (":" in name or name.partition("?")[0] in dict(engines())):
        return _engine(name)
    cases = {made.id: made for made in all_cases((suite,))}
    if as_markdown:
        command = "kvshard describe --markdown" + ("" if suite == SUITES[0] else f" --suite {suite}")
        return markdown.invariants(list(cases.values()), command)
    if name is None:
        return "\n\n".join(describe_case(made) for made in cases.values())
    if name not in cases:
        names = [*cases, *dict(engines())]
        raise UserError(f"{name!r} is no case of {suite} and no engine{nearest(name, names)} `kvshard list` shows all")
    return describe_case(cases[name])


def describe_case(made: Case) -> str:
    """Claim, reason, needs and non-vacuity conditions."""
    seen = [f"{event} at least {least} times" for event, least in made.seen.items()]
    seen += [f"{event} at least {least} times, with several ranks" for event, least in made.seen_in_groups.items()]
    lines = [made.id, *_wrapped("claim", made.claim), *_wrapped("kind of bug", made.reason)]
    lines += _wrapped("invariants", ", ".join(made.invariants))
    lines += _wrapped("needs", "")
    lines += [f"    {need:28} {CAPABILITIES[need]}" for need in made.needs]
    lines += _wrapped("must have met", ", ".join(seen) or "nothing in particular")
    return "\n".join([*lines, *_wrapped("written in", made.module)])


def describe_manifest(manifest: Manifest) -> str:
    """An engine's identity, axes and claims, each with its sentence; then what it does not claim."""
    axes = manifest.axes
    lines = [f"{manifest.name} {manifest.version}"]
    lines += [f"  shards {_list(axes.shards)}; page sizes {_list(axes.page_sizes)}; layouts {_list(axes.layouts)}"]
    lines += [f"  components {_list(axes.components)}; at most {axes.layers_max} layers"]
    for title, has, sentences in (
        ("takes", manifest.ops, OP_SENTENCES),
        ("shows", manifest.shows, SNAPSHOT_SENTENCES),
        ("promises", manifest.promises, PROMISE_SENTENCES),
    ):
        lines += [
            "",
            f"  {title}",
            *[f"    {name:20} {sentence}" for name, sentence in sentences.items() if name in has],
        ]
        lacking = [name for name in sentences if name not in has]
        lines += [f"    not claimed: {', '.join(lacking)}"] if lacking else []
    return "\n".join(lines)


def _engine(address: str) -> str:
    engine = connect(address)
    try:
        return describe_manifest(manifest_of(engine, address))
    finally:
        close(engine)


def _list(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _wrapped(title: str, words: str) -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=f"  {title:14} ", subsequent_indent=" " * 17) or [f"  {title}"]

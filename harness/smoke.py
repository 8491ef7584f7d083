"""`kvshard smoke`: tries every claim of an engine's manifest once, on a small session within its axes.

What is claimed and does not work is an error; what works and is not claimed is a note. Whether an engine is *right* is
for `kvshard run`. Exit codes: 0 every claim holds, 2 some could not be tried, 3 a claim is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from rich.table import Table
from rich.text import Text

from harness import render
from harness.adapter import Engine
from harness.capabilities import PROMISE_SENTENCES, SNAPSHOT_SENTENCES
from harness.connect import close, connect, manifest_of
from harness.types import (
    OPS,
    Abort,
    AnyOp,
    AnyReply,
    Axes,
    Config,
    Evict,
    Extend,
    Finish,
    Flush,
    Generate,
    Kill,
    Locate,
    Lose,
    Manifest,
    Ok,
    Open,
    Receive,
    Refused,
    Release,
    Replies,
    Reserve,
    Restart,
    Rows,
    Send,
    Service,
    Settle,
    Together,
    Unsupported,
    Verdict,
    layers_of,
    op_name,
)
from harness.usage import told
from harness.values import values_of
from harness.views import Snapshot

EXIT_NOTHING = 2
EXIT_ERROR = 3
LAYERS_MAX = 1 << 10


@dataclass(frozen=True, slots=True)
class Tried:
    """One claim and what became of it. Without a verdict it is a note."""

    claim: str
    verdict: Verdict | None
    what: str


@dataclass(slots=True)
class Played:
    """What a session answered and showed."""

    replies: dict[str, list[AnyReply | str]] = field(default_factory=dict)  # op -> replies; text tells an exception
    shown: dict[str, list[str]] = field(default_factory=dict)  # field -> where it was not shown
    ever: set[str] = field(default_factory=set)  # fields that were shown at least once
    problem: str = ""  # what kept the session from being looked at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvshard smoke`."""
    parser.add_argument("engine", metavar="ADDRESS", help="address, such as ref, ref?shards=4 or py:module:factory")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`."""
    console = render.console_for(sys.stdout)
    engine = connect(args.engine)
    try:
        manifest = manifest_of(engine, args.engine)
        found = list(smoke(engine, manifest))
    finally:
        close(engine)
    table = Table(box=None, pad_edge=False)
    table.add_column("claim", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("what", overflow="fold")
    for tried in found:
        style = render.STYLES[tried.verdict] if tried.verdict else "dim"
        table.add_row(Text(tried.claim), Text(str(tried.verdict or "note"), style=style), Text(tried.what))
    console.print(table)
    verdicts = [tried.verdict for tried in found if tried.verdict]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)) or "no claim"
    console.print(f"{manifest.name} {manifest.version}: {counts}")
    return exit_code(found)


def exit_code(found: Sequence[Tried]) -> int:
    """0 every claim holds, 2 some could not be tried or there is none, 3 a claim is wrong."""
    verdicts = {tried.verdict for tried in found}
    if Verdict.ERROR in verdicts:
        return EXIT_ERROR
    return EXIT_NOTHING if Verdict.UNKNOWN in verdicts or Verdict.PASS not in verdicts else 0


def smoke(engine: Engine, manifest: Manifest) -> Iterator[Tried]:
    """Tries axes, ops, snapshot fields and promises of an engine, and what it does not claim."""
    config = small(manifest.axes)
    axes = list(_axes(engine, manifest.axes, config))
    yield from axes
    if any(tried.verdict is Verdict.ERROR for tried in axes):
        return
    ops = script(config) if manifest.service is None else served_script(manifest.service)
    claimed = [op for op in ops if _is_claimed(op, manifest.ops)]
    played = play(engine, config, claimed, manifest.shows)
    if not claimed:
        yield Tried("ops", Verdict.UNKNOWN, "the manifest claims no op, so there is nothing to judge")
    for name in manifest.ops:
        yield _op(name, played.replies.get(name, []))
    for name in manifest.shows:
        yield _field(name, played)
    yield from _promises(engine, manifest, config, claimed, played)
    for name in SNAPSHOT_SENTENCES:
        if name not in manifest.shows and name in played.ever:
            yield Tried(f"snapshot.{name}", None, "is shown, yet not claimed")
    if len(manifest.ops) < len(OPS):
        others = play(engine, config, ops, ()).replies
        for name, replies in others.items():
            if name not in manifest.ops and any(_works(name, reply) for reply in replies):
                yield Tried(f"op.{name}", None, "works, yet is not claimed")


def small(axes: Axes) -> Config:
    """A small config within the axes, with two ranks where possible, room for the script and every component.

    Of a server that runs, the one that it has.
    """
    if axes.fixed is not None:
        return axes.fixed
    page = min(axes.page_sizes)
    return Config(
        shards=min(axes.shards, key=lambda ranks: (abs(ranks - 2), ranks)),
        page_size=page,
        pages_per_rank=16,
        layout=axes.layouts[0],
        layers=min(2, axes.layers_max),
        components=axes.components,
        chunk_tokens=8 * page,
        context_tokens=16 * page,
        host_pages_per_rank=16 if axes.host_policies else 0,
        host_policy=axes.host_policies[0] if axes.host_policies else "write_through",
        decode_pages=8 if axes.decode else 0,
    )


def script(config: Config) -> list[AnyOp]:
    """Every op at least once, where it makes sense. Prompts are two pages and a token, without a common start."""
    page = config.page_size
    starts = {"a": 1000, "b": 2000, "c": 3000}
    prompts = {name: tuple(range(start, start + 2 * page + 1)) for name, start in starts.items()}
    opens = {name: Open(name, tokens) for name, tokens in prompts.items()}
    chunks = {name: Extend(name, len(tokens), stamps(tokens, config)) for name, tokens in prompts.items()}
    return [
        opens["a"],
        chunks["a"],
        opens["b"],
        opens["c"],
        Together((chunks["b"], chunks["c"])),
        Reserve(1, len(prompts["a"])),
        Settle(),
        Send("a", 1),
        Settle(),
        Receive(1),
        Release(1),
        Finish("a"),
        Abort("c"),
        Evict(page),
        Settle(),
        Locate((0, 1, page * config.shards)),
        Finish("b"),
        Flush(),
        Restart(),
        Lose(0),
    ]


def _is_claimed(op: AnyOp, ops: Sequence[str]) -> bool:
    """Whether an op, and each one in it, is claimed."""
    inner = op.ops if isinstance(op, Together) else ()
    return {op_name(each) for each in (op, *inner)} <= set(ops)


def served_script(service: Service) -> list[AnyOp]:
    """Every op of a server, where it makes sense."""
    first, end = service.token_ids
    prompts = [tuple(range(first + at, end))[:40] for at in range(4)]
    long = Generate(request="d", tokens=prompts[3], max_new_tokens=32)
    return [
        Generate(request="a", tokens=prompts[0]),
        Together((Generate(request="b", tokens=prompts[1]), Generate(request="c", tokens=prompts[2]))),
        Together((long, Abort("d", 1))),
        Abort("d"),
        Settle(),
        Flush(),
        Kill("decode" if service.pair else ""),
        Restart(),
    ]


def stamps(tokens: Sequence[int], config: Config) -> Rows:
    """Made-up stamps, distinct for every token, layer and component."""
    return {
        component: tuple(
            tuple((token * len(config.components) + number) * LAYERS_MAX + layer for token in tokens)
            for layer in range(layers_of(config, component))
        )
        for number, component in enumerate(config.components)
    }


def play(engine: Engine, config: Config, ops: Sequence[AnyOp], shows: Sequence[str]) -> Played:
    """Plays ops on a fresh session and looks at it before the first and after each."""
    played = Played(shown={name: [] for name in shows})
    session = engine.open(config)
    try:
        _look(session.snapshot(), "at the start", shows, played)
        for op in ops:
            try:
                reply: AnyReply | str = session.apply(op)
            except Exception as error:  # noqa: BLE001  # an engine may raise anything
                reply = f"raised {told(error)}"
            played.replies.setdefault(op_name(op), []).append(reply)
            _look(session.snapshot(), f"after {op_name(op)}", shows, played)
    except Exception as error:  # noqa: BLE001  # an engine may raise anything
        played.problem = f"snapshot raised {told(error)}"
    finally:
        session.close()
    return played


def _look(snapshot: Snapshot, when: str, shows: Sequence[str], played: Played) -> None:
    for name in SNAPSHOT_SENTENCES:
        if name == "decode":
            shown = snapshot.decode is not None
        else:
            shown = bool(snapshot.ranks) and all(getattr(rank, name) is not None for rank in snapshot.ranks)
        if shown:
            played.ever.add(name)
        elif name in shows:
            hidden = [str(rank.rank) for rank in snapshot.ranks if getattr(rank, name, None) is None]
            text = f"is None {when} on rank {', '.join(hidden)}" if hidden else f"no rank is shown {when}"
            played.shown[name].append(text)


def _axes(engine: Engine, axes: Axes, config: Config) -> Iterator[Tried]:
    """Opens the small config with every value of one axis at a time."""
    if axes.fixed is not None:
        wrong_now = _opens(engine, config, "shards", config.shards)
        yield Tried("axes.fixed", Verdict.ERROR if wrong_now else Verdict.PASS, wrong_now or "opens as it is")
        return
    values: Mapping[str, tuple[str, Sequence[object]]] = {
        "shards": ("shards", axes.shards),
        "page_sizes": ("page_size", axes.page_sizes),
        "layouts": ("layout", axes.layouts),
        "components": ("components", [(component,) for component in axes.components[:1]]),
        "layers_max": ("layers", [axes.layers_max]),
        "host_policies": ("host_policy", axes.host_policies),
    }
    for axis, (name, possible) in values.items():
        wrong = [text for value in possible if (text := _opens(engine, config, name, value))]
        if not possible:
            continue
        text = wrong[0] if wrong else f"opens with {', '.join(map(str, possible))}"
        yield Tried(f"axes.{axis}", Verdict.ERROR if wrong else Verdict.PASS, text)


def _opens(engine: Engine, config: Config, name: str, value: object) -> str:
    """Why a session does not open; empty when it does."""
    changed = msgspec.structs.replace(config, **{name: value})
    if name == "page_size":
        page = changed.page_size
        changed = msgspec.structs.replace(changed, chunk_tokens=8 * page, context_tokens=16 * page)
    try:
        engine.open(changed).close()
    except Exception as error:  # noqa: BLE001  # an engine may raise anything
        return f"{name} {value}: {told(error)}"
    return ""


def _op(name: str, replies: Sequence[AnyReply | str]) -> Tried:
    """A claimed op: an exception, `Unsupported` or another kind of value is an error, a refusal leaves it open."""
    claim = f"op.{name}"
    for reply in replies:
        if isinstance(reply, str):
            return Tried(claim, Verdict.ERROR, reply)
        if inner := [one for one in _parts(reply) if isinstance(one, Unsupported)]:
            return Tried(claim, Verdict.ERROR, f"claimed, yet unsupported: {inner[0].why}")
        if isinstance(reply, Ok) and not isinstance(reply.value, values_of(name)):
            wanted = " or ".join(kind.__name__ for kind in values_of(name))
            return Tried(claim, Verdict.ERROR, f"gave {type(reply.value).__name__}, expected {wanted}")
    if any(_works(name, reply) for reply in replies):
        return Tried(claim, Verdict.PASS, "works")
    why = "; ".join(f"{type(reply).__name__.lower()}: {getattr(reply, 'why', reply)}" for reply in replies)
    return Tried(claim, Verdict.UNKNOWN, why or "was not tried")


def _works(name: str, reply: AnyReply | str) -> bool:
    if name == "together":
        return isinstance(reply, Replies) and [type(one) for one in reply.replies] == [Ok, Ok]
    return isinstance(reply, Ok) and isinstance(reply.value, values_of(name))


def _parts(reply: AnyReply) -> Sequence[AnyReply]:
    return reply.replies if isinstance(reply, Replies) else (reply,)


def _field(name: str, played: Played) -> Tried:
    claim = f"snapshot.{name}"
    if played.problem:
        return Tried(claim, Verdict.ERROR, played.problem)
    hidden = played.shown[name]
    return Tried(claim, Verdict.ERROR if hidden else Verdict.PASS, hidden[0] if hidden else "is shown")


def _promises(
    engine: Engine, manifest: Manifest, config: Config, ops: Sequence[AnyOp], played: Played
) -> Iterator[Tried]:
    """Two promises can be tried in passing; the others are for the cases of a suite."""
    for name in PROMISE_SENTENCES:
        if name not in manifest.promises:
            continue
        claim = f"promise.{name}"
        if name == "deterministic":
            same = play(engine, config, ops, ()).replies == played.replies
            what = "the same replies twice" if same else "other replies to the same ops on a fresh session"
            yield Tried(claim, Verdict.PASS if same else Verdict.ERROR, what)
        elif name == "refuses_misuse" and "finish" in manifest.ops:
            (reply,) = play(engine, config, [Finish("nobody")], ()).replies["finish"]
            refused = isinstance(reply, Refused)
            what = "refuses to finish a request that does not live" if refused else f"finishing an unknown one: {reply}"
            yield Tried(claim, Verdict.PASS if refused else Verdict.ERROR, what)
        else:
            yield Tried(claim, None, "is for `kvshard run` to judge")

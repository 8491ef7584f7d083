"""What each tolerance would miss: `python -m ci.planted [ENGINE...]` plants faults before real servers.

A proxy between client and engine answers as an engine with a wrong cache would (ci/planted_proxy.py). The table says
which case caught each fault, and how far its answers were off, beside the declared tolerance and the noise of the
engine without a fault. llama.cpp and vLLM run in the environments that `bash ci/engine.sh NAME --install-only` makes.
`--record` keeps each result as it comes; an engine of which the file has all is not asked again.

Exit codes: 0 every fault was caught and nothing else, 1 one was not, or a case failed without one, 2 one was never
there or a case did not decide, 3 wrong usage or servers that do not start, 130 interrupted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ci.planted_faults import FAULTS, NOTHING
from ci.planted_page import line, page
from ci.planted_trial import Fate, fates
from harness.launch.deployment import Deployment
from harness.launch.processes import LaunchError
from harness.launch.topology import read
from harness.record import decoded, write_text
from harness.suite import all_cases
from harness.usage import UserError

ROOT = Path(__file__).parent.parent
OUT = ROOT / "out" / "engine"
READY_SECONDS = 600
GREEDY = "promises=-seeded"  # tokens are the likeliest ones, which a fault changes least
EXIT_USAGE = 3
EXIT_INTERRUPTED = 130


class Place(NamedTuple):
    """Where an engine is: the topology, the options of its address, and what its model is written by.

    `runs_in` is the environment, which engines share.
    """

    topology: str
    options: str
    model: str = ""
    runs_in: str = ""
    prefill: str = ""  # the worker that prompts go to first, where the proxy stands before another one


PLACES: Mapping[str, Place] = MappingProxyType(
    {
        "ref": Place("ci/planted_ref.toml", f"dialect=sglang&{GREEDY}"),
        "llamacpp": Place(
            "fixtures/topologies/llamacpp.toml", f"dialect=llama.cpp&{GREEDY}", "ci.llamacpp_model", "llamacpp"
        ),
        "vllm": Place("fixtures/topologies/vllm.toml", f"dialect=vllm&{GREEDY}", "ci.vllm_model", "vllm"),
        "vllm_pd": Place(
            "fixtures/topologies/vllm_pd.toml", f"dialect=vllm&{GREEDY}", "ci.vllm_model", "vllm", "prefill"
        ),
    }
)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser("python -m ci.planted", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(PLACES)} (default all)")
    add("--only", action="append", default=[], metavar="FAULT", help=f"of {', '.join(FAULTS)}; may be there twice")
    add("--seed", type=int, default=1, metavar="INT", help="of the cases (default 1)")
    add("--record", type=Path, metavar="FILE", help="keep results (JSONL); what it has is not run again")
    add("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    return parser


def environment(name: str, place: Place) -> dict[str, str]:
    """What the workers of a topology need, with the model written. Raises `UserError` without the environment."""
    if not place.model:
        return {}
    own = place.runs_in
    python = ROOT / f".venv-{own}" / "bin" / "python"
    if not python.is_file():
        raise UserError(f"{name}: there is no {python}; make it: bash ci/engine.sh {name} --install-only")
    folder = OUT / own
    subprocess.run([python, "-m", place.model, folder], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    model = next(folder.glob("*.gguf"), folder)
    return {f"{own.upper()}_PYTHON": str(python), f"{own.upper()}_MODEL": str(model)}


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code. Raises `UserError`, `LaunchError`."""
    for given, known in ((args.engines, PLACES), (args.only, FAULTS)):
        for name in given:
            if name not in known:
                raise UserError(f"{name!r}; expected one of {', '.join(known)}")
    for option, path in (("--record", args.record), ("--markdown", args.markdown)):
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise UserError(f"{option} {path}: expected a file in a folder that exists")
    faults = [name for name in FAULTS if not args.only or name in {NOTHING, *args.only}]
    told = {(each.engine, each.fault): each for each in _kept(args.record)}
    for name in args.engines or PLACES:
        is_kept = all((name, fault) in told for fault in faults)
        for its in () if is_kept else _tried(name, faults, args.seed):
            told[its.engine, its.fault] = its
            sys.stdout.write(line(its) + "\n")
            sys.stdout.flush()
            if args.record is not None:
                with args.record.open("ab") as record:
                    record.write(msgspec.json.encode(its) + b"\n")
    if args.markdown is not None:
        write_text(args.markdown, page(list(told.values()), datetime.now(UTC).date().isoformat()))
    return code(list(told.values()))


def code(told: Sequence[Fate]) -> int:
    """The exit code; see the module."""
    if any(its.applies and bool(its.caught) == (its.fault == NOTHING) for its in told):
        return 1
    return 2 if any(its.why for its in told) else 0


def _tried(name: str, faults: Sequence[str], seed: int) -> Iterator[Fate]:
    place = PLACES[name]
    given = [f"defaults.env.{key}={value}" for key, value in environment(name, place).items()]
    topology = read(ROOT / place.topology, [f"defaults.ready_seconds={READY_SECONDS}", *given])
    cases = all_cases(("e2e",))
    with Deployment(topology, OUT / f"{name}-planted-logs") as up:
        options = f"{place.options}&control={up.url('control')}"
        options += f"&prefill={up.url(place.prefill)}" if place.prefill else ""
        for its in fates(name, up.entry, options, faults, cases, seed):
            up.check()
            yield its


def _kept(path: Path | None) -> list[Fate]:
    if path is None or not path.exists():
        return []
    return [decoded(path, number, text, Fate) for number, text in enumerate(path.read_bytes().splitlines(), 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    args = arguments().parse_args(argv)
    try:
        return run(args)
    except (UserError, LaunchError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"planted: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("planted: interrupted\n")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

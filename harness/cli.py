"""`kvshard`: the command line. Each command is a module with `add_arguments(parser)` and `run(args) -> int`.

A module is imported when its command is used, so that `--help` is quick. Wrong usage is one line on stderr and code 3.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from harness.provenance import kvshard_version
from harness.usage import UserError, nearest

EXIT_USAGE = 3
EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """A command: its module, what it does, and its exit code for wrong usage."""

    module: str
    does: str
    usage: int = EXIT_USAGE


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "run": Command("harness.runner", "judge an engine, or several in turn, with a suite of cases"),
        "matrix": Command("harness.matrix_cli", "engines beside each other, from the records of their runs"),
        "list": Command("harness.listing", "engines and cases; which cases an engine can run"),
        "describe": Command("harness.describing", "what a case claims and needs, or what an engine claims"),
        "smoke": Command("harness.smoke", "try every claim of an engine's manifest once"),
        "replay": Command("harness.replayer", "play a counterexample again, op by op"),
        "selfcheck": Command("harness.selfcheck", "plant faults in an engine and see whether the suites find them"),
        "doctor": Command("harness.doctor_cli", "what this host can run, and what is missing for the rest"),
        "serve": Command("harness.serve_cli", "run the reference as a server: one worker", usage=2),
        "up": Command("harness.up_cli", "start the servers of a topology file and keep them", usage=2),
        "tell": Command("harness.tell_cli", "end or restart a worker of a `kvshard up` that runs a command", usage=2),
        "capacity": Command("harness.capacity_cli", "what sharding buys on given traffic"),
        "gate": Command("harness.gate_cli", "accuracy of two runs compared, planned, calibrated, simulated", usage=2),
        "ci": Command("ci.cli", "register, plan and run tests on CPU and GPU runners"),
        "bench": Command("harness.bench_index_cli", "how long an index takes for a request, beside another engine's"),
    }
)


class Parser(argparse.ArgumentParser):
    """Wrong usage is raised, not printed with an exit of its own."""

    def error(self, message: str) -> NoReturn:
        """Raises `UserError`."""
        raise UserError(f"{message}; see {self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises `UserError` for an option that does not exist, with the nearest one that does."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            raise UserError(f"unknown argument {' '.join(unknown)}{near} See {self.prog} --help")
        return known


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code of the command."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except UserError as error:
        print(f"kvshard: {error}", file=sys.stderr)
        return COMMANDS[words[0]].usage if words[0] in COMMANDS else EXIT_USAGE
    except KeyboardInterrupt:
        print("kvshard: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else EXIT_USAGE
    name, *rest = words
    if name == "--version":
        print(f"kvshard {kvshard_version()}")
        return 0
    if name not in COMMANDS:
        raise UserError(f"there is no command {name!r}{nearest(name, COMMANDS)} There is: {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[name].module)
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(f"kvshard {name}", description=module.__doc__, formatter_class=raw, allow_abbrev=False)
    module.add_arguments(parser)
    # argparse takes options between positional arguments for the end of the first ones
    cut = rest.index("--") if getattr(module, "TAKES_COMMAND", False) and "--" in rest else len(rest)
    try:
        args = parser.parse_args(rest[:cut])
        if cut < len(rest):
            args.command = rest[cut + 1 :]
        code: int = module.run(args)
    except SystemExit as done:  # argparse after --help
        return int(done.code or 0)
    sys.stdout.flush()
    return code


def _help() -> str:
    lines = [
        "usage: kvshard COMMAND ...",
        "",
        "Is a sharded KV cache right, and what does sharding buy.",
        "",
        "commands:",
    ]
    lines += [f"  {name:10} {command.does}" for name, command in COMMANDS.items()]
    lines += ["", "kvshard COMMAND --help says more; kvshard --version tells the version.", "", "first steps:"]
    lines += ["  kvshard run ref --budget smoke", "  kvshard run py:my_package.my_module:my_factory"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""The first case that fails against the kvshard_ref found first on the path: `first_failure.py FOLDER [LOOK ...]`.

Prints one line of JSON. A look is "engine pattern", such as "order tiers"; after them all cases are tried on all
engines. FOLDER is where kvshard_ref must come from, else nothing would be proven.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from harness.case import Case, select
from harness.connect import close, connect
from harness.suite import all_cases
from harness.trial import BUDGETS, Trial
from harness.types import Verdict

ENGINES = {"rows": "ref", "order": "ref?device=order", "adversary": "ref?device=adversary"}


def looks(asked: list[str]) -> Iterator[tuple[str, Case, str]]:
    """(engine, case, budget): where it was asked to look, then everywhere."""
    cases = all_cases()
    for look in asked:
        engine, pattern = look.split(" ", 1)
        yield from ((engine, made, "commit") for made in select(cases, pattern))
    for engine in ENGINES:
        yield from ((engine, made, "smoke") for made in cases)


def main() -> None:
    """Tries case after case and tells the first failure."""
    spec = find_spec("kvshard_ref")
    where = Path(spec.origin).parent.parent if spec is not None and spec.origin is not None else None
    if where is None or where != Path(sys.argv[1]):
        raise SystemExit(f"kvshard_ref comes from {where}, expected {sys.argv[1]}")
    started = time.perf_counter()
    engines = {name: connect(address) for name, address in ENGINES.items()}
    told: dict[str, object] = {"how": ""}
    for name, made, budget in looks(sys.argv[2:]):
        result, _ = Trial(made, engines[name], ENGINES[name], BUDGETS[budget], seed=1).run()
        if result.verdict is Verdict.FAIL and result.failure is not None:
            seconds = round(time.perf_counter() - started, 1)
            failure = result.failure
            told = {"how": name, "case": made.id, "ops": len(failure.ops), "seconds": seconds, "seen": failure.seen}
            break
    for engine in engines.values():
        close(engine)
    print(json.dumps(told))


if __name__ == "__main__":
    main()

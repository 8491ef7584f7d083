"""Faults and variants of the miniature engine, named after what should become of them."""

from __future__ import annotations

from harness.fault import Change, Edit, Fault, Swap, Variant
from harness.types import Unsupported

SESSION = "tests.miniature:MiniatureSession"
READS_FIRST = Edit(
    f"{SESSION}._read",
    "self.stamps[component, layer, page, offset] for page, offset in places",
    "self.stamps[component, layer, places[0][0], places[0][1]] for _ in places",
)
WRONG_IS_RIGHT = Edit("tests.miniature:wrong", "(Wrong,", "(MiniatureSession,")
TRIALS = "tests/test_trial.py"


def fault(name: str, *changes: Change, breaks: tuple[str, ...] = (), tests: tuple[str, ...] = ()) -> Fault:
    return Fault(name, f"It is {name}.", "mini", "systematic", breaks, changes, tests=tests)


def variant(name: str, *changes: Change, drops: tuple[str, ...] = ()) -> Variant:
    return Variant(name, f"It is {name}.", changes, drops)


FAULTS = (
    fault("killed.reads_first", READS_FIRST, breaks=("sample.reads",)),
    fault("killed.frees_often", Edit(f"{SESSION}.do_finish", "self.free.append(page)", "self.free += [page] * 99")),
    fault("killed.raises", Edit(f"{SESSION}.do_finish", "kept = ", "kept = 1 // 0 * "), breaks=("I01",)),
    fault("survives.keeps_none", Edit(f"{SESSION}.do_finish", "Finished(kept)", "Finished(0)")),
    fault("idle.evicts", Edit(f"{SESSION}.do_evict", "op.tokens <= 0", "op.tokens <= 1")),
    fault("error.takes_none", Swap(f"{SESSION}.do_extend", lambda *_: Unsupported("no"))),
    fault("dies.at_once", Edit(f"{SESSION}.do_open", "cached = 0", "os._exit(7)")),
)
UNIT = (  # run where unit tests may run
    fault("unit.killed", WRONG_IS_RIGHT, tests=(f"{TRIALS}::test_a_counterexample_is_as_short_as_it_gets",)),
    fault("unit.idle", WRONG_IS_RIGHT, tests=(f"{TRIALS}::test_a_play_judges_every_op",)),
    fault(
        "unit.survives",
        Edit("tests.miniature:correct", "if unknown:", "if len(unknown) > 1:"),
        tests=(f"{TRIALS}::test_a_play_judges_every_op",),
    ),
    fault("unit.missing", WRONG_IS_RIGHT, tests=("tests/test_none.py",)),
)
VARIANTS = (
    variant("passes.last_page_first", Edit(f"{SESSION}.do_extend", "self.free.pop(0)", "self.free.pop()")),
    variant(
        "passes.misuse",
        Edit(f"{SESSION}.do_open", "or not op.tokens", "or len(op.tokens) < 1"),
        drops=("refuses_misuse",),
    ),
    variant("refused.reads_first", READS_FIRST),
    variant("idle.aborts", Edit(f"{SESSION}.do_abort", "Done()", "(Done())[0]")),
)

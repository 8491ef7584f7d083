"""The suites' plans go on whatever an engine says: they judge nothing, and have no opinion on what is accepted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ci.register import register_cpu_ci
from harness.adapter import Engine, Session
from harness.case import Case
from harness.connect import connect
from harness.play import Play
from harness.suite import SUITES, all_cases
from harness.types import AnyOp, AnyReply, Config, Manifest, Open, Refused, Replies, Together
from harness.views import Snapshot
from suites.claim import StepWatch

register_cpu_ci(est_time=60, stage="commit")

FAVOURS = (1.0, 0.9, 0.5, 0.1)  # shares of ops that are refused
EXAMPLES = 12


class Unwilling:
    """An engine that refuses what it likes: new prompts, or any op."""

    def __init__(self, engine: Engine, random: Random, share: float, only: type[AnyOp] | None) -> None:
        self._engine, self._random, self._share, self._only = engine, random, share, only
        self._session: Session | None = None

    def describe(self) -> Manifest:
        return self._engine.describe()

    def open(self, config: Config) -> Unwilling:
        self._session = self._engine.open(config)
        return self

    def apply(self, op: AnyOp) -> AnyReply:
        assert self._session is not None
        if self._random.random() >= self._share or (self._only and not isinstance(op, self._only)):
            return self._session.apply(op)
        refused = Refused("it does not like to")
        return Replies((refused,) * len(op.ops)) if isinstance(op, Together) else refused

    def snapshot(self) -> Snapshot:
        assert self._session is not None
        return self._session.snapshot()

    def close(self) -> None:
        assert self._session is not None
        self._session.close()


@pytest.mark.parametrize("made", all_cases((SUITES[0],)), ids=lambda made: made.id)
def test_a_plan_goes_on_when_refused(made: Case) -> None:
    """No plan raises when an engine refuses a part of what it is asked, or everything."""
    unjudged = replace(made, watch=lambda config, manifest: StepWatch(lambda _: None, config, manifest))
    engine = connect("ref")
    configs = made.configs(engine.describe().axes)

    @settings(
        max_examples=EXAMPLES,
        phases=(Phase.generate,),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def example(data: st.DataObject) -> None:
        only = data.draw(st.sampled_from((Open, None)))
        unwilling = Unwilling(engine, Random(data.draw(st.integers(0, 99))), data.draw(st.sampled_from(FAVOURS)), only)
        play = Play(unjudged, unwilling, data.draw(configs), steps_max=10)
        try:
            made.plan(data.draw, play)
        finally:
            play.close()

    example()

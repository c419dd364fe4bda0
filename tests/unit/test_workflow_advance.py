"""What `advance` decides where the moment of a decision matters."""

from uuid import UUID

from rota.model import workflow_advance
from rota.model.workflow import StepSpec, WorkflowSpec
from rota.model.workflow_advance import advance, new
from rota.model.workflow_cel import METER, Meter
from rota.model.workflow_check import compiled
from rota.model.workflow_run import Began, Facts, RunState, SagaEnded
from rota.model.workflow_words import expression

COSTLY = "input.l.all(x, x >= 0)"
GIVEN = {"l": list(range(100))}


def test_a_run_that_failed_by_its_output_has_failed_however_cheap_that_is_later(monkeypatch):
    spent = Meter(10**9)
    expression(COSTLY, "a test")({"input": GIVEN, METER: spent})
    enough_for_one = (10**9 - spent.left) * 3 // 2
    monkeypatch.setattr(workflow_advance, "Meter", lambda: Meter(enough_for_one))
    step = StepSpec(id="a", type="condition", condition=COSTLY)
    flow = compiled(WorkflowSpec(name="any", steps=(step,), output={"x": f"${{{COSTLY}}}"}))
    now, facts = new(flow), Facts(UUID(int=1), "any", 1, GIVEN)
    state, _ = advance(flow, now, facts, {}, [Began()], 0)
    assert (state, now.error[:30]) == (RunState.FAILED, "The expressions of this run wo")
    assert advance(flow, now, facts, {}, [SagaEnded()], 0)[0] is RunState.FAILED, "what it did was undone"

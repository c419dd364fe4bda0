"""`advance`: decisions that must not change when repeated later."""

from uuid import UUID

from rota.model.cel_guard import CostMeter
from rota.model.workflows import state_machine
from rota.model.workflows.cel import METER_KEY
from rota.model.workflows.compiler import compile_workflow
from rota.model.workflows.expressions import compile_expression
from rota.model.workflows.run_state import RunBegan, RunInfo, RunState, SagaEnded
from rota.model.workflows.spec import StepSpec, WorkflowSpec
from rota.model.workflows.state_machine import advance, new_run_status

COSTLY = "input.l.all(x, x >= 0)"
GIVEN = {"l": list(range(100))}


def test_run_that_failed_in_its_output_stays_failed_when_later_evaluation_is_cheaper(monkeypatch):
    spent = CostMeter(10**9)
    compile_expression(COSTLY, "a test")({"input": GIVEN, METER_KEY: spent})
    enough_for_one = (10**9 - spent.left) * 3 // 2
    monkeypatch.setattr(state_machine, "CostMeter", lambda: CostMeter(enough_for_one))
    step = StepSpec(id="a", type="condition", condition=COSTLY)
    flow = compile_workflow(WorkflowSpec(name="any", steps=(step,), output={"x": f"${{{COSTLY}}}"}))
    now, facts = new_run_status(flow), RunInfo(UUID(int=1), "any", 1, GIVEN)
    state, _ = advance(flow, now, facts, {}, [RunBegan()], 0)
    assert (state, now.error[:30]) == (RunState.FAILED, "The expressions of this run wo")
    assert advance(flow, now, facts, {}, [SagaEnded()], 0)[0] is RunState.FAILED, "it stays failed after compensation"

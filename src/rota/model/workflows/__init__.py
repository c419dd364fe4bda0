"""Workflows: definitions, the state machine of a run, expressions, approvals and compensation.

`compile_workflow` checks a `WorkflowSpec` once; `state_machine.advance` takes the status of a run and its inbox and
returns a `Transition`, which `rota.workflow` executes in one transaction. Nothing here does I/O, so `advance` gives the
same result for the same input; `rota.workflow` re-evaluates after a crash and `rota.testing` uses it in memory.

| module | subject |
|---|---|
| `spec` | `WorkflowSpec`, `StepSpec`: what users declare |
| `limits`, `compiler` | all limits of a definition; `CompiledWorkflow` with indexes and compiled expressions |
| `expressions`, `cel` | `${...}` templates and paths; the CEL that they may use |
| `run_state` | run and step states, inbox messages, `Transition` |
| `state_machine`, `failures` | what a run does next; how failures propagate |
| `approval_steps` | steps that wait for approval: terms, rendering, hash |
| `compensation` | the submission that undoes a job |
| `waits`, `dry_run` | what a run waits for; what a run would do |
"""

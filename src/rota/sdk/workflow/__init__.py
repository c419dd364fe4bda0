"""Workflows in Python: a function declares steps (`builder`); values of a run are expressions (`deferred_values`).

`workflow` turns the function into a `WorkflowSpec`, the same as YAML does, and starts runs; `run` is a handle of a run.
The compiler in `rota.model.workflows` validates the spec before anything is sent.
"""

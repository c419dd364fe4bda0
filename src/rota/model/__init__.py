"""Domain model: ids, units, states, messages, validation, settings and errors.

Invariants:

* Pure: no I/O, no clock, no randomness. Time and random bytes are arguments. import-linter forbids the modules that
  would allow otherwise, and every import of another Rota package.
* One implementation per decision. Dispatch, explain and tests call the same functions; where PostgreSQL or Redis must
  decide as well (`quota`, `circuit_breaker`), property tests compare the implementations.
* Input is validated here once; refusals are `InvalidInput` with a sentence that names the field and the remedy.

Every other package imports this one.

| module | subject |
|---|---|
| `ids`, `units`, `urls` | typed ids; cores, memory and durations; URLs without passwords |
| `errors`, `reasons` | the exception tree with stable codes; reason codes of waiting and ended jobs |
| `job_states`, `quota` | job and frame states; whether a booking fits its limits |
| `token_ranges` | tokens as ranges of consecutive ones, and the set operations on them |
| `protocol`, `events`, `sse` | bus messages between servers and workers; the event stream; server-sent events |
| `jobs` | submissions: structs, validation, frame ranges |
| `policy` | policy requests, decisions, constraints and output checks |
| `workflows` | workflow definitions, the run state machine, expressions, compensation |
| `agents`, `schedules`, `failure_classes` | recurring work, its schedules, classification of failures |
| `approvals`, `access`, `api_key_format` | approvals and votes; roles and grants; the format of API keys |
| `cel_guard` | what CEL expressions may contain and cost |
| `artifacts`, `backoff`, `circuit_breaker` | artifact names; retry delays; the circuit breaker state machine |
| `settings` | the settings tree and how it is resolved |
"""

"""Policy data: requests about jobs and outputs, decisions, and how constraints apply.

`rota.policy` evaluates rules and runs the kernel; `rota.engine.admission` and `rota.engine.outputs` request decisions
and enforce them. A decision depends only on the submitted job and the policy snapshot, so equal jobs share one request.

| module | subject |
|---|---|
| `decision` | `PolicyRequest`, `PolicyDecision`, the `Kernel` protocol |
| `constraints` | how the constraints of a decision change what a worker runs |
| `outputs` | output checks, restrictions and reviews; `check_readable` |
"""

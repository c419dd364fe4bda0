"""Policy: whether a job may run and whether its output may leave. See docs/adr/0020-policy.md.

| module | subject |
|---|---|
| `loader`, `rules`, `globs`, `expressions`, `regex` | the policy file: parsing, rules, globs, CEL, RE2 |
| `evaluate` | pure evaluation of a compiled policy |
| `kernel`, `snapshots`, `file_watch`, `signature` | the local policy engine, its versions, reloading the file |
| `grpc` | the policy engine over gRPC: client, service and the process of `rota kernel` |
| `factory` | which engine a process uses |
| `rate_limits` | velocity limits, counted in Redis |
| `request_builder` | policy requests from jobs; identical ones are sent once |
| `decision_store`, `enabled_flag` | decisions in PostgreSQL; whether servers use a policy |
| `approvals`, `approval_hash` | approvals and votes |
| `lint`, `policy_tests` | tools for authors of policies |
| `output` | rules and scanners for outputs |

Invariants and who enforces them:
- Evaluation is pure and a deny rule can only deny: `evaluate`.
- One batch of requests is decided by one policy version: `kernel`.
- An unknown or malformed decision never allows: `grpc.messages`, `grpc.client`.
- An invalid policy file never replaces a valid one: `file_watch`.

`rota.engine.admission` and `rota.engine.outputs` call this package and carry out its decisions. Imports nothing here:
only the modules that use gRPC, CEL and RE2 pay for loading them.
"""

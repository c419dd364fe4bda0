"""Admission: the policy decides whether a job may run, before any frame of it is queued.

Submission consults the gate (`decision`) or queries the policy before the write (`precheck`); every other job is
written as PENDING and decided by the `AdmissionController`, woken by an outbox message. The leader's `PendingReplayer`
covers lost messages, retries and approval expiry. The HTTP API calls `Approver` and `PolicyQueries`.

| module | responsibility |
|---|---|
| `decision` | verdicts, gates, and how a policy decision becomes an admission decision |
| `precheck` | queries the policy before jobs are written |
| `controller` | decides PENDING jobs in batches |
| `policy_call` | one call to the policy engine, with timeout and reply validation |
| `transitions` | applies decisions: admit, defer, hold for approval |
| `approval_requests` | approvals that jobs need, and whether a grant is still sufficient |
| `approvals` | votes, expiry, and their effect |
| `pending_replayer` | safety net: undecided, deferred and approved jobs |
| `policy_queries` | explains and simulates policies on stored jobs |
| `audit` | audit entries of decisions |

Invariants: a job is queued at most once, and only from PENDING (row lock of the job, `rota.job_admit`); no job is
queued by a decision older than `DECISION_TTL_S` (compared by the clock of PostgreSQL); an approval is valid only for
the submission that it was requested for (hash).
"""

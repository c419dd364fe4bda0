"""Submission: validates jobs and writes them with their layers, caps, idempotency keys and queue entries.

Callers: the HTTP API and the replica (`Submitter`, `SubmissionBatcher`), the bus (`BusSubmissionConsumer`), the SDK
inside a caller's transaction (`submit_on_async`, `submit_on_sync`), workflows and agents.

| module | responsibility |
|---|---|
| `submitter` | validates and writes a batch, in its own or the caller's transaction |
| `batcher` | group commit of concurrent single submissions |
| `bus_consumer` | submissions that arrive on `sys.job.submit` |
| `statements` | the SQL statements of a submission, independent of the driver |
| `columns` | submissions as column arrays for one INSERT |
| `single_job` | one job of one layer as the arguments of its own statement |
| `dry_run` | evaluates a submission and rolls it back |

Invariants: a batch is written completely or not at all, a job together with its queue entries (one statement,
`rota.job_submit` or, for a job alone, `rota.job_submit_one`); one idempotency key, one job (primary key of
`rota.idempotency_key`); no job is queued without an admission decision that is still valid (`rota.engine.admission`).
"""

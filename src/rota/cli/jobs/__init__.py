"""`rota submit`, `rota jobs`, `rota job` and `rota explain`.

All of them work on PostgreSQL alone (`open_jobs`). Submissions and cancellation requests commit before anything is
printed; a server acts on them. Waiting is polling, so an interrupted wait never affects the job.

| module | content |
|---|---|
| `commands` | Typer commands |
| `actions` | submit, list, show, retry, remediate, cancel, results |
| `submit_args`, `dry_run` | command line to `Submission`; `--dry-run` |
| `wait`, `watch` | polling until a job ends; the live display |
| `logs`, `artifacts` | output of frames |
| `view`, `explain_view` | formatting |
"""

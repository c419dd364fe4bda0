"""Queries: read models of jobs, frames, results, logs, queues and workers for the API, the CLI and the SDK.

| module | subject |
|---|---|
| `jobs` | a job with its layers, filtered pages of jobs, ends and artifacts of frames |
| `results` | results of frames in pages bounded by size |
| `frames` | frames that are on workers |
| `logs` | log chunks: received from workers, stored, read back in order |
| `log_cursor` | follows one stream of a log, across gaps and attempts |
| `queues` | queues with owners and exact counts; pause and resume |
| `workers` | worker records, and a placement registry built from them |
| `wait_for_end` | one shared poll for all callers that wait for a job or run |

Reads see live and finished jobs alike; a job that ends during a read is found once. Outputs withheld by the policy are
never returned: the SQL function `rota.output_readable` enforces it.
"""

"""Structs of the HTTP API: what requests and responses contain. No I/O and no logic.

| module | subject |
|---|---|
| `jobs`, `job_results` | jobs with their layers, and what their frames returned, wrote and stored |
| `resources` | shows, subscriptions, folders, departments, pools, topics, workers, queues |
| `admin` | API keys, the ledger, settings, dead letters |
| `agents` | agents, their runs and backfills |
| `approvals`, `policy` | an approval with its subject; requests about the policy |
| `logs` | the streams of a frame, and their chunks |
| `submission` | many submissions in one request |
| `pages` | a page of a list |
| `workflows` | workflow definitions, runs, sagas |
| `explanation`, `run_explanation` | why a job or a run waits, or how it ended |

The server, the HTTP client, the CLI and the SDK share these types. Field names are part of the wire format.
"""

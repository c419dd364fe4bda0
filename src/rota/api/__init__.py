"""Structs of the HTTP API: what requests and responses contain. No I/O and no logic.

| module | subject |
|---|---|
| `resources` | shows, subscriptions, folders, departments, pools, topics, workers, queues |
| `admin` | API keys, the ledger, dead letters |
| `agents` | agents, their runs and backfills |
| `logs` | log chunks with their offsets |
| `submission` | independent submissions in one request |
| `workflows` | workflow definitions, runs, sagas |
| `explanation`, `run_explanation` | why a job or a run waits, or how it ended |

The server, the HTTP client, the CLI and the SDK share these types. Field names are part of the wire format.
"""

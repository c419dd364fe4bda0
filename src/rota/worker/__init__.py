"""Worker process: accepts assignments from the servers over NATS, runs frames and reports their results.

    assignments ─► FrameTable ─► AsyncRunner │ TaskProcessRunner │ CommandRunner ─► FrameTable ─► ResultReporter
    cancels ─────►     │                                                               └─► ProgressReporter
                       └─► HeartbeatThread

Frames need NATS only; a worker has no PostgreSQL or Redis credentials. Agents do need both (`agents`).

Invariants:
- every heartbeat lists an accepted token until its result is stored (`frame_table`, `result_reporter`);
- a token runs at most once per session, however often its assignment is redelivered (`token_deduplicator`);
- a frame's end is reported once (`frame_table`); the server's fence refuses reports of an expired session;
- capacity is checked here: a frame that does not fit is refused, even if a server booked it (`capacity`).

| module | subject |
|---|---|
| `worker`, `session` | registration, and the time between two registrations |
| `config`, `registration_info`, `host_metrics` | configuration, advertised resources, measured load |
| `frames`, `frame_table`, `capacity`, `token_deduplicator` | state of accepted frames |
| `heartbeat`, `result_reporter`, `progress_reporter`, `outcomes`, `tracing` | messages to the servers |
| `runners/` | execution: event loop, processes, commands |
| `processes/` | child processes for sync tasks and sync agents: pool, handshake, messages, kill and reap |
| `data/` | inputs, results, artifacts, logs |
| `agents/` | recurring agents of the app |

Callers: `rota worker` and `rota up` (`rota.cli`).
"""

"""Execution of frames: async tasks on the event loop, sync tasks in processes, commands as child processes.

Each runner takes an `AssignedBatch` in `add`, starts its frames through `FrameTable`, sets their `request_stop` and
`kill`, and ends each once. An exception of user code, `SystemExit` included, ends its frame, never the worker.

| module | subject |
|---|---|
| `async_runner`, `coroutine_pool`, `exit_guard` | async tasks; they cannot be killed, only cancelled |
| `process_runner`, `process_main`, `process_messages` | sync tasks in child processes (`rota.worker.processes`) |
| `command_runner`, `rlimits` | commands with resource limits |
| `environment` | the environment of a frame |
"""

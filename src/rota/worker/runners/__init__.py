"""Execution of frames: async tasks on the event loop, sync tasks in processes, commands as child processes.

Each runner takes an `AssignedBatch` in `add`, starts its frames through `FrameTable`, sets their `request_stop` and
`kill`, and ends each once. An exception of user code, `SystemExit` included, ends its frame, never the worker.

| module | subject |
|---|---|
| `async_runner`, `coroutine_pool`, `exit_guard` | async tasks; they cannot be killed, only cancelled |
| `process_pool`, `process_main`, `ipc` | sync tasks in reusable child processes |
| `command_runner`, `command_launcher`, `rlimits` | commands with resource limits |
| `os_process`, `environment` | child processes and the environment of a frame |
"""

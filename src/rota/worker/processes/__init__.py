"""Child processes of a worker: sync code that can be killed. Tasks (`runners`) and agents (`agents`) use the same ones.

    ProcessPool ─► ChildProcess ═ RequestQueue, socket ═ main.run_child ─► handler of one kind
                        └─► OsProcess (output, signals, exit)

A child is started by exec and never forked from the worker, loads the app, and says that it is ready; then it handles
one request at a time. `runners` and `agents` define requests and messages, what happens to output, and the handler.

Invariants:
- a process is starting, idle in its pool, or belongs to one caller, which releases or closes it (`pool`);
- a request ends once: by a message of the process, or by the exit of the process (`child`);
- the end of a process kills its process group (`os_process`); a child dies with its worker (`main`), and so does its
  process group (`group_guard`).

| module | subject |
|---|---|
| `pool` | idle processes, started on demand and reused |
| `child` | one process as the worker sees it: start handshake, requests, messages, stop and close |
| `main` | the other side: what every child does before, between and after requests |
| `request_queue` | requests that the child has not taken, which the worker can take back |
| `ipc` | framing of messages |
| `os_process` | spawn, output, signals and exit of a child process |
| `group_guard`, `group_killer` | a second process that kills the process groups of a worker that was killed |
| `fork_server`, `forked_process` | commands: forked from a small process, with limits and a parent-death signal |
"""

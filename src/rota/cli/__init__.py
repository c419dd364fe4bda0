"""The `rota` command line.

One sub-package for each group of commands: `commands.py` declares the Typer commands, `actions.py` does the work,
`view.py` formats the result. Most commands read and write PostgreSQL directly and need neither Redis nor NATS; the
servers pick up committed changes.

Invariants:
- Every command accepts `-o text|wide|json|yaml` where it prints data (`core.tables.CliPage` holds both forms).
- An error is one sentence with a code on standard error; `core.exit_codes` lists the exit statuses.
- A change and its audit entry commit in one transaction, before anything is printed.
- Heavy imports are inside the commands, so that `rota --help` is fast.

| package | commands |
|---|---|
| `core` | shared: options, output, tables, id lookup, exit codes |
| `jobs` | `submit`, `jobs`, `job`, `explain` |
| `queue`, `pools`, `worker` | `queue`, `workers`, `worker` |
| `quota` | `show`, `pool`, `sub`, `folder`, `dept`, caps of `job` and `layer` |
| `dlq`, `outputs`, `events`, `ledger` | commands of the same name |
| `workflows`, `agents`, `approvals`, `policy` | `workflow`, `agents`, `approvals`, `policy` |
| `keys`, `db` | `keys`, `db`, `audit` |
| `doctor`, `top`, `local` | `doctor`, `top`, `up`, `down`, `status` |
"""

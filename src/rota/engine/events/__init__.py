"""Events: notifications of changes, published to the JetStream stream EVENTS and served to clients by every replica.

PostgreSQL is the record; events only save clients from polling. They are published after the commit, at most once, and
may be lost with a process. Every known gap becomes a `reset` event, upon which a client reads the state again.

| module | subject |
|---|---|
| `sources` | connects the callbacks of the engine's parts to the publisher |
| `publisher` | bounded in-memory queue of this replica, published in batches |
| `audit_source` | changes in the audit trail, published by one leader |
| `server_presence` | servers that join, leave or die; a dead server may have taken events with it |
| `show_names` | cache of show names and ids for events |
| `subscriptions` | reads the stream once per replica into a ring; subscribers read from the ring |
| `history` | histories of jobs and runs, read from PostgreSQL when an event announces a change |

The HTTP API serves `subscriptions` and `history`; agents and workflows publish through `publisher`.
"""

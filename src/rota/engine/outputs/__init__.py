"""Output policy: checks what frames return before it is read, and withholds or redacts it.

| module | subject |
|---|---|
| `sync_check` | checks metadata and error texts in the transaction that ends a frame |
| `async_scanner` | scans the content after the frame has ended |
| `frame_end_lock` | locks the ends of frames that a verdict changes |
| `stored_parts` | the parts of an output, read from the store in chunks |
| `review` | people inspect, release and redact withheld outputs |

Invariants: a scan is a row written in the transaction that ends the frame, so none is lost with a process; a verdict
and its effects are one transaction that first deletes the scan under its claim number, so of two verdicts one applies.
The content of an output is never logged. Jobs that wait for this one start only after its held outputs are decided.

`engine.completion` calls `sync_check`; the engine runs the scanner as a service; the HTTP API and the CLI call
`review`.
"""

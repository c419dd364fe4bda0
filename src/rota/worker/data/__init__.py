"""Data of frames on a worker: inputs and results (`payloads`), artifacts, logs (`log_capture`), the blob store.

Values of at most `INLINE_VALUE_BYTES_MAX` travel inside messages, larger ones as a pointer into the blob store, a
directory shared with the servers. A result names only blobs that are already stored. Crash between the write to the
store and the report: the blob is unreferenced, and the store's retention removes it.

Callers: `rota.worker.runners` and `rota.worker.session`.
"""

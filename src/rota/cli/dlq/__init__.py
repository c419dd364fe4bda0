"""`rota dlq`: dead letters, and failed frames within their retention.

`groups` gives both kinds of entry one interface (count, find, remove), `actions` counts, asks and applies in audited
batches, `view` formats.
"""

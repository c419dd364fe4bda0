"""The blob store for values too large for messages: inputs, results and artifacts, addressed by pointers.

    store      `put` and `get`; chooses PostgreSQL or files by size; retention
    table      blobs in PostgreSQL, one partition per day
    files      blobs in a shared directory
    pointers   location, SHA-256 and length of a value; pure

Invariants: a pointer identifies its content, so reads are verified; a blob exists before the pointer to it commits; a
blob in use is never removed, whatever its age. Callers: engine (inputs, results), worker, server (downloads).
"""

from rota.infra.blob_store.files import BlobDirectory
from rota.infra.blob_store.pointers import BlobLocation, BlobPointer, pointer_to
from rota.infra.blob_store.store import BlobStore, BlobStoreTarget
from rota.infra.blob_store.table import PUT, put_arguments

__all__ = [
    "PUT",
    "BlobDirectory",
    "BlobLocation",
    "BlobPointer",
    "BlobStore",
    "BlobStoreTarget",
    "pointer_to",
    "put_arguments",
]

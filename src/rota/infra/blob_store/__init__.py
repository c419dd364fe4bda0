"""One store for what is too large to travel: inputs, results and artifacts, named by pointers."""

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

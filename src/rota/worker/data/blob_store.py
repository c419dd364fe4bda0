"""The worker's access to the blob store: a directory shared with the servers, for values too large for a message."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rota.infra.blob_store import BlobDirectory, BlobLocation, BlobPointer, pointer_to
from rota.model.errors import InvalidInput


class WorkerBlobStore(Protocol):
    """All methods block: call them in a thread. They raise RotaError for a bad store or pointer."""

    def put(self, data: bytes) -> str: ...

    def put_file(self, path: Path) -> str: ...

    def get(self, pointer: str) -> bytes: ...


class FileStore:
    def __init__(self, directory: Path, most_bytes: int = 16 * 1024 * 1024) -> None:
        self._files = BlobDirectory(directory)
        self._most_bytes = most_bytes

    def put(self, data: bytes) -> str:
        if len(data) > self._most_bytes:
            raise InvalidInput(f"The value is larger than {self._most_bytes} bytes, the store's limit for one value.")
        pointer = pointer_to(data, BlobLocation.FILE)
        self._files.put(pointer, data)
        return str(pointer)

    def put_file(self, path: Path) -> str:
        return str(self._files.put_file(path, self._most_bytes))

    def get(self, pointer: str) -> bytes:
        parsed = BlobPointer.parse(pointer)
        if parsed.where is not BlobLocation.FILE:
            raise InvalidInput(f"{pointer[:80]} is not in the store's directory: workers read only from there.")
        return self._files.get(parsed)

"""Where values lie that are too large to travel, as a worker reaches it: files of a directory that servers share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rota.infra.blob_store import BlobDirectory, BlobLocation, BlobPointer, pointer_to
from rota.model.errors import InvalidInput


class WorkerBlobStore(Protocol):
    """All may take long and are called in a thread. A RotaError says what is wrong with the store or the pointer."""

    def put(self, data: bytes) -> str: ...

    def put_file(self, path: Path) -> str: ...

    def get(self, pointer: str) -> bytes: ...


class FileStore:
    def __init__(self, directory: Path, most_bytes: int = 16 * 1024 * 1024) -> None:
        self._files = BlobDirectory(directory)
        self._most_bytes = most_bytes

    def put(self, data: bytes) -> str:
        if len(data) > self._most_bytes:
            raise InvalidInput(f"It has more than the {self._most_bytes} bytes that the store keeps of one value.")
        pointer = pointer_to(data, BlobLocation.FILE)
        self._files.put(pointer, data)
        return str(pointer)

    def put_file(self, path: Path) -> str:
        return str(self._files.put_file(path, self._most_bytes))

    def get(self, pointer: str) -> bytes:
        found = BlobPointer.parse(pointer)
        if found.where is not BlobLocation.FILE:
            raise InvalidInput(
                f"{pointer[:80]} does not lie in the store's directory, and a worker reads nothing else."
            )
        return self._files.get(found)

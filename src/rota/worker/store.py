"""Where values lie that are too large to travel, as a worker reaches it: files of a directory that servers share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rota.infra.store import Files, Pointer, Where, pointer_to
from rota.model.errors import InvalidInput


class Store(Protocol):
    """Both may take long and are called in a thread. A RotaError says what is wrong with the store or the pointer."""

    def put(self, data: bytes) -> str: ...

    def get(self, pointer: str) -> bytes: ...


class FileStore:
    def __init__(self, directory: Path) -> None:
        self._files = Files(directory)

    def put(self, data: bytes) -> str:
        pointer = pointer_to(data, Where.FILE)
        self._files.put(pointer, data)
        return str(pointer)

    def get(self, pointer: str) -> bytes:
        found = Pointer.parse(pointer)
        if found.where is not Where.FILE:
            raise InvalidInput(
                f"{pointer[:80]} does not lie in the store's directory, and a worker reads nothing else."
            )
        return self._files.get(found)

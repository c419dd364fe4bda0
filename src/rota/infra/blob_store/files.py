"""Blobs as files of a directory shared by all replicas.

A value is written under a temporary name beside its final path and renamed when complete, so readers never see a
partial file; a crashed writer leaves a temporary file, which the sweep removes. Putting a value again renews its age.
The sweep first renames a file away and then checks its age: if the value was put again in between, the file is renamed
back.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO

from rota.infra.blob_store.pointers import BlobLocation, BlobPointer
from rota.model.errors import BlobMissing, DiskFull, InvalidInput, SetupFailed

TEMPORARY_AGE_MAX_S = 3600.0
"""A temporary file older than this no longer has a writer."""
COPY_CHUNK_BYTES = 1024 * 1024
_TEMPORARY = ".tmp-"
_REMOVING = ".gone-"


class BlobDirectory:
    """All methods block; the store calls them in threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put(self, pointer: BlobPointer, data: bytes) -> None:
        path = self._path(pointer.sha256.hex())
        try:
            os.utime(path)
        except FileNotFoundError:
            self._write(path, data)
        except OSError as error:
            raise _directory_error(self.directory, error) from error

    def put_file(self, source: Path, most_bytes: int) -> BlobPointer:
        """Copy a file. The pointer identifies the bytes read, even if the file changes meanwhile."""
        with source.open("rb") as source_file:
            return self.put_parts(iter(partial(source_file.read, COPY_CHUNK_BYTES), b""), most_bytes)

    def get(self, pointer: BlobPointer) -> bytes:
        with self.open(pointer) as file:
            return pointer.verify(self.read_part(file, -1))

    def open(self, pointer: BlobPointer) -> IO[bytes]:
        """The file of a value; it stays readable when the sweep removes it."""
        path = self._path(pointer.sha256.hex())
        for _ in range(2):  # the sweep may be renaming it back
            try:
                return path.open("rb")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _directory_error(self.directory, error) from error
        raise BlobMissing(f"The value {pointer} is no longer stored.", pointer=str(pointer))

    def read_part(self, file: IO[bytes], size: int) -> bytes:
        try:
            return file.read(size)
        except OSError as error:
            raise _directory_error(self.directory, error) from error

    def sweep(self, before_s: float, now_s: float, used: Collection[bytes]) -> int:
        """Remove unused blobs put before `before_s` (seconds since 1970); returns the number."""
        names = {sha256.hex() for sha256 in used}
        removed = 0
        for path in self._files():
            if path.name.startswith((_TEMPORARY, _REMOVING)):
                self._unlink_if_older(path, now_s - TEMPORARY_AGE_MAX_S)
            elif path.name not in names:
                removed += self._remove_if_older(path, before_s)
        return removed

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def _write(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync(path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _directory_error(self.directory, error) from error

    def put_parts(self, parts: Iterator[bytes], most_bytes: int) -> BlobPointer:
        """Store a value that is produced in parts."""
        temporary = self._path("00").with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as target_file:
                pointer = _copy(parts, target_file, most_bytes)
            path = self._path(pointer.sha256.hex())
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(path)
            _sync(path.parent)
        except OSError as error:
            raise _directory_error(self.directory, error) from error
        finally:
            with suppress(OSError):  # already renamed, or never created
                temporary.unlink()
        return pointer

    def _files(self) -> Iterator[Path]:
        for directory in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
            if directory.is_dir() and len(directory.name) == 2:
                yield from sorted(directory.iterdir())

    def _remove_if_older(self, path: Path, before_s: float) -> bool:
        removing = path.with_name(f"{_REMOVING}{path.name}")
        try:
            if path.stat().st_mtime >= before_s:
                return False
            path.rename(removing)
            if removing.stat().st_mtime >= before_s:
                removing.rename(path)
                return False
        except FileNotFoundError:
            return False
        removing.unlink(missing_ok=True)
        return True

    def _unlink_if_older(self, path: Path, before_s: float) -> None:
        try:
            if path.stat().st_mtime < before_s:
                path.unlink()
        except FileNotFoundError:
            return


def _copy(parts: Iterator[bytes], target_file: IO[bytes], most_bytes: int) -> BlobPointer:
    digest, size = sha256(), 0
    for part in parts:
        size += len(part)
        if size > most_bytes:
            raise InvalidInput(f"The value is larger than {most_bytes} bytes, the store's limit for one value.")
        digest.update(part)
        target_file.write(part)
    target_file.flush()
    os.fsync(target_file.fileno())
    return BlobPointer(BlobLocation.FILE, digest.digest(), size)


def _sync(directory: Path) -> None:
    """Make the file name durable across a power failure."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _directory_error(directory: Path, error: OSError) -> SetupFailed:
    if error.errno == 28:
        return DiskFull(f"The store's directory {directory} is full: free some space, or set another directory.")
    return SetupFailed(
        f"The store's directory {directory} cannot be used ({error.strerror}): correct its permissions, or set another."
    )

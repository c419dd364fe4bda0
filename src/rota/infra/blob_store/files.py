"""The part of the store that lies in files, of a directory that all who use it share.

A value is written beside its place under a name of its own and moved there when it is complete, so whoever finds it
finds all of it, and a writer that dies leaves a temporary file behind that the sweep removes. What is put again is
young again. The sweep takes a file out of its place first and looks at its age then: if somebody has put the value
between its two looks, the file goes back.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO

from rota.infra.blob_store.pointers import BlobLocation, BlobPointer
from rota.model.errors import BlobMissing, DiskFull, InvalidInput, SetupFailed

TEMPORARY_AGE_MAX_S = 3600.0
"""A temporary file that nobody has written to for so long has no writer any more."""
COPY_CHUNK_BYTES = 1024 * 1024
_TEMPORARY = ".tmp-"
_REMOVING = ".gone-"


class BlobDirectory:
    """All methods block; the store calls them in threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put(self, pointer: BlobPointer, data: bytes) -> None:
        place = self._path(pointer.sha256.hex())
        try:
            os.utime(place)
        except FileNotFoundError:
            self._write(place, data)
        except OSError as error:
            raise _directory_error(self.directory, error) from error

    def put_file(self, source: Path, most_bytes: int) -> BlobPointer:
        """A copy of a file. What the pointer names is what was read, even if somebody writes to the file meanwhile."""
        with source.open("rb") as given:
            return self._copy_in(given, most_bytes)

    def get(self, pointer: BlobPointer) -> bytes:
        place = self._path(pointer.sha256.hex())
        for _ in range(2):  # the sweep may just be putting it back
            try:
                return pointer.verify(place.read_bytes())
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _directory_error(self.directory, error) from error
        raise BlobMissing(f"Nothing is kept under {pointer} any more.", pointer=str(pointer))

    def sweep(self, before_s: float, now_s: float, used: Collection[bytes]) -> int:
        """Remove what was put before that moment (seconds since 1970) and is not in use; returns how many."""
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

    def _write(self, place: Path, data: bytes) -> None:
        temporary = place.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(place)
            _sync(place.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _directory_error(self.directory, error) from error

    def _copy_in(self, given: IO[bytes], most_bytes: int) -> BlobPointer:
        temporary = self._path("00").with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as kept:
                pointer = _copy(given, kept, most_bytes)
            place = self._path(pointer.sha256.hex())
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(place)
            _sync(place.parent)
        except OSError as error:
            raise _directory_error(self.directory, error) from error
        finally:
            with suppress(OSError):  # it has its place by now, or never was
                temporary.unlink()
        return pointer

    def _files(self) -> Iterator[Path]:
        for directory in sorted(self.directory.iterdir()) if self.directory.is_dir() else ():
            if directory.is_dir() and len(directory.name) == 2:
                yield from sorted(directory.iterdir())

    def _remove_if_older(self, path: Path, before_s: float) -> bool:
        leaving = path.with_name(f"{_REMOVING}{path.name}")
        try:
            if path.stat().st_mtime >= before_s:
                return False
            path.rename(leaving)
            if leaving.stat().st_mtime >= before_s:
                leaving.rename(path)
                return False
        except FileNotFoundError:
            return False
        leaving.unlink(missing_ok=True)
        return True

    def _unlink_if_older(self, path: Path, before_s: float) -> None:
        try:
            if path.stat().st_mtime < before_s:
                path.unlink()
        except FileNotFoundError:
            return


def _copy(given: IO[bytes], kept: IO[bytes], most_bytes: int) -> BlobPointer:
    digest, size = sha256(), 0
    while part := given.read(COPY_CHUNK_BYTES):
        size += len(part)
        if size > most_bytes:
            raise InvalidInput(f"It has more than the {most_bytes} bytes that the store keeps of one value.")
        digest.update(part)
        kept.write(part)
    kept.flush()
    os.fsync(kept.fileno())
    return BlobPointer(BlobLocation.FILE, digest.digest(), size)


def _sync(directory: Path) -> None:
    """So that the name outlives a power cut, too."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _directory_error(directory: Path, error: OSError) -> SetupFailed:
    if error.errno == 28:
        return DiskFull(f"There is no room left in the store's directory {directory}: make some, or move it.")
    return SetupFailed(
        f"The store's directory {directory} cannot be used ({error.strerror}): make it one that can, or set another."
    )

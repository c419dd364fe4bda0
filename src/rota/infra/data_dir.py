"""The data directory of a `rota up`, as other processes see it: who owns it, and files that are replaced whole.

    <data>/lock        exclusive flock of the owner, inherited by its servers; names the owner
    <data>/up.json     the addresses of a running `rota up`
    <data>/api.key     the key of its API, 0600

Only the lock identifies the owner, so files of a killed `rota up` are never taken for those of a running one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from rota.model.errors import DiskFull, InvalidSetting, SetupFailed

LINUX: bool = sys.platform.startswith("linux")
UP_FILE: Final = "up.json"


class DataDirOwner(msgspec.Struct, frozen=True):
    """The owner of a data directory. Pids are reused; with the start time a pid identifies one process."""

    pid: int
    started: str = ""

    @classmethod
    def current(cls) -> DataDirOwner:
        return cls(os.getpid(), _start_time(os.getpid()) or "")

    @property
    def alive(self) -> bool:
        """Whether that process still runs; without a start time, whether any process has that pid."""
        if LINUX:
            return bool(self.started) and _start_time(self.pid) == self.started
        return _pid_exists(self.pid)


UNKNOWN_OWNER = DataDirOwner(0)
"""A process holds the lock and has not written its pid yet, or only servers of a killed owner hold it."""


def owner_of(path: Path) -> DataDirOwner | None:
    """The owner of the data directory at `path`; None if there is none."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unusable_path_error(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return read_owner(fd)
    finally:
        os.close(fd)
    return None


def read_owner(fd: int) -> DataDirOwner:
    try:
        return msgspec.json.decode(os.pread(fd, 256, 0), type=DataDirOwner)
    except msgspec.DecodeError:
        return UNKNOWN_OWNER


def resolve_data_dir(path: Path) -> Path:
    """The absolute path, with `~` and links resolved."""
    try:
        found = path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidSetting(f"local.data-dir {str(path)!r} cannot be resolved ({error}): correct it.") from error
    if not str(found).isprintable():
        raise InvalidSetting(f"local.data-dir {str(found)!r} has unprintable characters: choose another path.")
    return found


def write_private(path: Path, content: str | bytes) -> None:
    """Atomically replace `path` with `content`, readable by its owner only."""
    temporary = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def unusable_path_error(path: Path, error: OSError) -> SetupFailed:
    """The error for a path that the system does not let us use."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(f"No space left at {path}: free some space, or set local.data-dir to another disk.")
    return SetupFailed(
        f"{path} cannot be used ({error.strerror}): set local.data-dir to a directory that you can write."
    )


def _start_time(pid: int) -> str | None:
    """The start time of process `pid` in kernel clock ticks; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""The data directory: who owns it, which ports and passwords its servers use.

    <data>/lock               exclusive flock of the owner, inherited by the servers; holds the owner's pid
    <data>/state.json         ports, so that URLs survive a restart
    <data>/credentials.json   generated passwords, 0600
    <data>/{postgres,redis,nats}/  what each server keeps, <data>/log/ what it says

Files are replaced by rename, so a reader or a crash never sees half of one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from rota.model.errors import DataDirInUse, DiskFull, PortTaken, SetupFailed

T = TypeVar("T")
SERVERS = ("postgres", "redis", "nats")
# A killed owner's servers need a moment to stop in order; a live owner is told at once.
WAIT_FOR_ORPHANS_S = 20.0
WAIT_FOR_OWNER_S = 0.2
POLL_S = 0.02
# Below the range that systems take outgoing connections' ports from: while a killed server is being started again, its
# port must not go to somebody's connection.
PORTS = range(20_000, 32_000)
PORT_TRIES = 100
ROOM_FOR_A_NEW_CLUSTER_MB = 96
ROOM_TO_START_MB = 24


class State(msgspec.Struct):
    """What `state.json` holds."""

    ports: dict[str, int] = {}


class DataDir:
    """A data directory this process owns until `release`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd
        self.ports = _read(path / "state.json", State, State()).ports
        self.passwords = _read(path / "credentials.json", dict[str, str], {})

    @classmethod
    def claim(cls, path: Path) -> DataDir:
        """Own `path`, making it if need be; waits for servers of a killed owner, never for a live one."""
        path = path.expanduser().resolve()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            _lock(lock_fd, path)
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
            return cls(path, lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise

    def prepare(self) -> None:
        """Make folders and passwords that are not there yet, and see that there is room to start."""
        try:
            self._need_room()
            for name in (*SERVERS, "log"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            missing = [name for name in SERVERS if name not in self.passwords]
            if missing:
                self.passwords |= {name: secrets.token_urlsafe(24) for name in missing}
                write_private(self.path / "credentials.json", msgspec.json.encode(self.passwords))
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _need_room(self) -> None:
        made = (self.path / "postgres" / "data" / "PG_VERSION").exists()
        needed_mb = ROOM_TO_START_MB if made else ROOM_FOR_A_NEW_CLUSTER_MB
        free_mb = shutil.disk_usage(self.path).free // 2**20
        if free_mb < needed_mb:
            raise DiskFull(
                f"{self.path} has {free_mb} MB free and Rota needs {needed_mb} MB to start; "
                "make room there, or set local.data-dir to another disk."
            )

    def port(self, name: str) -> int:
        """The port kept for `name` if it is still free, else another free one, which is kept."""
        kept = self.ports.get(name)
        if kept is None or not port_is_free(kept):
            self.ports[name] = _free_port()
            self.save()
        return self.ports[name]

    def save(self) -> None:
        write_private(self.path / "state.json", msgspec.json.encode(State(self.ports)))

    def log(self, name: str) -> Path:
        return self.path / "log" / f"{name}.log"

    def release(self) -> None:
        os.close(self.lock_fd)


def owner_of(path: Path) -> int | None:
    """The pid that owns the data directory at `path`; None when nobody does."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(fd)
    finally:
        os.close(fd)
    return None


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def write_private(path: Path, content: str | bytes) -> None:
    """Replace `path` with `content` in one step, readable by its owner alone."""
    beside = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _lock(fd: int, path: Path) -> None:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _pid_in(fd)
            orphaned = owner is not None and not is_alive(owner)
            if time.monotonic() - began > (WAIT_FOR_ORPHANS_S if orphaned else WAIT_FOR_OWNER_S):
                raise DataDirInUse(
                    f"{path} is in use by process {owner or 'unknown'}; run `rota down` first, "
                    "or set local.data-dir to another directory."
                ) from None
            time.sleep(POLL_S)
        else:
            return


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else None


def _free_port() -> int:
    for _ in range(PORT_TRIES):
        port = PORTS.start + secrets.randbelow(len(PORTS))
        if port_is_free(port):
            return port
    raise PortTaken(f"No free port was found between {PORTS.start} and {PORTS.stop}; set local.*.port.")


def _read(path: Path, shape: type[T], default: T) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=shape)
    except FileNotFoundError:
        return default
    except msgspec.DecodeError as error:
        raise SetupFailed(f"{path} is damaged ({error}); restore it, or remove {path.parent} to start anew.") from error


def _cannot_write(path: Path, error: OSError) -> SetupFailed:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(f"No space left at {path}; make room there, or set local.data-dir to another disk.")
    return SetupFailed(f"{path} cannot be written ({error.strerror}); set local.data-dir to a directory of yours.")

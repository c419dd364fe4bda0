"""The data directory: its owner, and the ports and passwords of its servers.

    <data>/lock               exclusive flock of the owner, inherited by the servers; names the owner
    <data>/state.json         ports, so that URLs survive a restart
    <data>/credentials.json   generated passwords, 0600
    <data>/api.key            key of the API, 0600; see `rota.client.endpoint`
    <data>/{postgres,redis,nats}/  the data of each server; <data>/log/ their logs

Files are replaced by rename, so neither a reader nor a crash sees a partial file.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from rota.infra.data_dir import DataDirOwner, read_owner, resolve_data_dir, unusable_path_error, write_private
from rota.model.errors import DataDirInUse, DiskFull, PortTaken, SetupFailed

T = TypeVar("T")
SERVERS = ("postgres", "redis", "nats")
# The servers of a killed owner need time to stop cleanly; with a live owner, fail fast.
ORPHANS_TIMEOUT_S = 20.0
OWNER_TIMEOUT_S = 0.2
POLL_INTERVAL_S = 0.02
# Below the ephemeral port range: while a killed server restarts, no outgoing connection may take its port.
PORT_RANGE = range(20_000, 32_000)
PORT_ATTEMPTS_MAX = 100
FREE_MIN_NEW_CLUSTER_MB = 96
FREE_MIN_START_MB = 24


Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class DataDirState(msgspec.Struct):
    """The content of `state.json`."""

    ports: dict[str, Port] = {}


class DataDir:
    """A data directory this process owns until `release`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd
        self.ports = _read_json(path / "state.json", DataDirState, DataDirState()).ports
        self.passwords = _read_json(path / "credentials.json", dict[str, str], {})
        if self.passwords:
            (path / "credentials.json").chmod(0o600)

    @classmethod
    def claim(cls, path: Path) -> DataDir:
        """Own `path`, creating it if needed; waits for servers of a killed owner, never for a live owner."""
        path = resolve_data_dir(path)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unusable_path_error(path, error) from error
        try:
            _lock(lock_fd, path)
            _write_owner(lock_fd, DataDirOwner.current())
            return cls(path, lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise

    def prepare(self) -> None:
        """Create missing folders and passwords, and check the free disk space."""
        try:
            self._check_disk_space()
            self._check_passwords()
            for name in (*SERVERS, "log"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            missing = [name for name in SERVERS if name not in self.passwords]
            if missing:
                self.passwords |= {name: secrets.token_urlsafe(24) for name in missing}
                write_private(self.path / "credentials.json", msgspec.json.encode(self.passwords))
        except OSError as error:
            raise unusable_path_error(self.path, error) from error

    @property
    def _has_cluster(self) -> bool:
        return (self.path / "postgres" / "data" / "PG_VERSION").exists()

    def _check_passwords(self) -> None:
        if self._has_cluster and "postgres" not in self.passwords:
            raise SetupFailed(
                f"{self.path / 'credentials.json'} is missing, and the cluster cannot be opened without it: "
                "restore it, or set local.data-dir to a new directory."
            )

    def _check_disk_space(self) -> None:
        needed_mb = FREE_MIN_START_MB if self._has_cluster else FREE_MIN_NEW_CLUSTER_MB
        free_mb = shutil.disk_usage(self.path).free // 2**20
        if free_mb < needed_mb:
            raise DiskFull(
                f"{self.path} has {free_mb} MB free and Rota needs {needed_mb} MB to start: "
                "free some space, or set local.data-dir to another disk."
            )

    def port(self, name: str) -> int:
        """The stored port of `name` if it is still free, else another free one, which is stored."""
        stored = self.ports.get(name)
        if stored is None or not port_is_free(stored):
            self.ports[name] = _free_port()
            self.save()
        return self.ports[name]

    def save(self) -> None:
        write_private(self.path / "state.json", msgspec.json.encode(DataDirState(self.ports)))

    def log(self, name: str) -> Path:
        return self.path / "log" / f"{name}.log"

    def release(self) -> None:
        os.ftruncate(self.lock_fd, 0)
        os.close(self.lock_fd)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _lock(fd: int, path: Path) -> None:
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = read_owner(fd)
            timeout_s = OWNER_TIMEOUT_S if owner.alive else ORPHANS_TIMEOUT_S
            if time.monotonic() - began > timeout_s:
                raise DataDirInUse(
                    f"{path} is in use by process {owner.pid or 'unknown'}: run `rota down` first, "
                    "or set local.data-dir to another directory."
                ) from None
            time.sleep(POLL_INTERVAL_S)
        else:
            return


def _write_owner(fd: int, owner: DataDirOwner) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, msgspec.json.encode(owner), 0)


def _free_port() -> int:
    for _ in range(PORT_ATTEMPTS_MAX):
        port = PORT_RANGE.start + secrets.randbelow(len(PORT_RANGE))
        if port_is_free(port):
            return port
    raise PortTaken(f"No free port was found between {PORT_RANGE.start} and {PORT_RANGE.stop}: set local.*.port.")


def _read_json(path: Path, kind: type[T], default: T) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return default
    except OSError as error:
        raise unusable_path_error(path, error) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SetupFailed(f"{path} is damaged ({error}): restore it, or remove {path.parent} to start over.") from error

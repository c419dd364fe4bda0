"""Local PostgreSQL: one cluster below `<data>/postgres/data`, TCP on loopback only, SCRAM passwords."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from rota.infra.data_dir import write_private
from rota.local.binaries import Binary
from rota.local.datadir import DataDir
from rota.local.identity import Identity, RootMode, postgres_identity, readable_bin_dir
from rota.local.process import ChildProcess
from rota.local.server import PROBE_TIMEOUT_S, LocalServer
from rota.model.errors import BinaryMissing, DataDirVersion, DiskFull, LoginRefused, ServerFailed, SetupFailed

INITDB_TIMEOUT_S = 60.0
DATABASE = "rota"
ROLE = "rota"


class PostgresServer(LocalServer):
    """`durable=False` trades durability across a power cut for speed; a killed process loses nothing either way."""

    name = "postgres"
    stop_signal = signal.SIGINT  # fast shutdown: ends sessions, leaves the cluster clean
    kill_signal = signal.SIGQUIT  # immediate shutdown; never SIGKILL, which leaves its children behind

    def __init__(
        self, home: DataDir, binary: Binary, fixed_port: int | None, *, root_mode: RootMode, durable: bool
    ) -> None:
        super().__init__(home, binary, fixed_port)
        self.durable = durable
        self._identity = postgres_identity(root_mode, home.path)
        self._bin_dir = readable_bin_dir(binary.path.parent, self._identity, home.path)
        if not (self._bin_dir / "initdb").exists():
            raise BinaryMissing(f"{self._bin_dir} has no initdb beside postgres: install PostgreSQL's server package.")
        self._check_version()

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def data(self) -> Path:
        return self.dir / "data"

    @property
    def url(self) -> str:
        return self._url(DATABASE)

    def _url(self, database: str) -> str:
        return f"postgresql://{ROLE}:{self.password}@127.0.0.1:{self.port}/{database}?sslmode=disable"

    def _check_version(self) -> None:
        """Checked before any start: never touch a cluster of another major version."""
        version_file = self.data / "PG_VERSION"
        if not version_file.exists():
            return
        major = version_file.read_text().strip()
        if major != str(self.binary.version[0]):
            raise DataDirVersion(
                f"{self.data} was made by PostgreSQL {major} and {self.binary.path} is {self.binary.label}: "
                f"set local.postgres.bin to a PostgreSQL {major}, or local.data-dir to a new directory."
            )

    async def prepare(self) -> None:
        self._identity.chown(self.dir)
        self._identity.chown(self.data)
        if (self.data / "PG_VERSION").exists():
            return
        if self.data.exists():
            raise SetupFailed(f"{self.data} is not a PostgreSQL cluster: move it away, or set local.data-dir.")
        temporary = self.dir / "data.new"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        password_file = self.dir / "password"
        write_private(password_file, self.password)
        self._identity.chown(temporary)
        self._identity.chown(password_file)
        try:
            await self._initdb(temporary, password_file)
        finally:
            password_file.unlink()
        temporary.rename(self.data)

    async def _initdb(self, target: Path, password_file: Path) -> None:
        argv: list[str | Path] = [self._bin_dir / "initdb", "-D", target, "-U", ROLE, "-E", "UTF8", "--locale=C"]
        argv += ["--auth=scram-sha-256", f"--pwfile={password_file}", "--no-instructions"]
        argv += [] if self.durable else ["--no-sync"]
        process = ChildProcess.spawn(
            argv,
            log=self.home.log("initdb"),
            lock_fd=self.home.lock_fd,
            die_with=signal.SIGKILL,
            identity=self._identity,
        )
        try:
            if await process.wait(INITDB_TIMEOUT_S) and process.status == 0:
                return
        finally:
            process.send_signal(signal.SIGKILL)
        if "No space left on device" in process.log_tail():
            raise DiskFull(f"There is no space for a PostgreSQL cluster at {self.dir}: free some space.")
        raise ServerFailed(f"initdb of {self.binary.label} failed: {process.log_tail()}")

    def argv(self) -> list[str | Path]:
        conf = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 200,
            "shared_buffers": "128MB",
            "max_wal_size": "1GB",
            "wal_compression": "on",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_min_messages": "warning",
        }
        if not self.durable:
            # Not synchronous_commit=off: that would lose acknowledged commits when a process is killed.
            conf |= {"fsync": "off", "full_page_writes": "off"}
        args: list[str | Path] = [self._bin_dir / "postgres", "-D", self.data]
        for key, value in conf.items():
            args += ["-c", f"{key}={value}"]
        return args

    async def probe(self) -> None:
        import asyncpg

        try:
            connection = await asyncpg.connect(self.url, timeout=PROBE_TIMEOUT_S)
        except asyncpg.InvalidPasswordError as error:
            raise LoginRefused(
                f"{self.data} refuses the password in {self.home.path / 'credentials.json'}: restore that file, "
                "or set local.data-dir to a new directory."
            ) from error
        except asyncpg.InvalidCatalogNameError:
            await self._create_database()
            connection = await asyncpg.connect(self.url, timeout=PROBE_TIMEOUT_S)
        await connection.close()

    async def _create_database(self) -> None:
        import asyncpg

        connection = await asyncpg.connect(self._url("postgres"), timeout=PROBE_TIMEOUT_S)
        try:
            await connection.execute(f'CREATE DATABASE "{DATABASE}"')
        finally:
            await connection.close()

    def _is_retryable(self, log_tail: str) -> bool:
        # The children of a killed postmaster hold its shared memory for a few more milliseconds.
        return super()._is_retryable(log_tail) or "is still in use" in log_tail or "already exists" in log_tail

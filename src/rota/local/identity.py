"""The account the servers run as. PostgreSQL refuses uid 0, so a root owner needs another identity.

* `userns`: a private user namespace maps root to an ordinary uid. Files stay owned by root, nothing is chowned, no
  account is created, and it works below a 0700 home. The default where the kernel allows it.
* `setuid`: run as `postgres` or `nobody`. The data directory is chowned to that account; binaries below a closed
  directory are copied to a private folder that the account can read. For hosts that forbid user namespaces.
* `plain`: the owner is not root; nothing to do.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rota.model.errors import SetupFailed

LAUNCHER = Path(__file__).with_name("launch.py")


class RootMode(StrEnum):
    AUTO = "auto"
    USERNS = "userns"
    SETUID = "setuid"


@dataclass(frozen=True, slots=True)
class Identity:
    """Arguments for `launch` that change the identity, and the account that must own the files (None: unchanged)."""

    mode: str
    words: tuple[str, ...] = ()
    uid: int | None = None
    gid: int | None = None

    def chown(self, path: Path) -> None:
        """Chown `path` recursively to the account the server runs as."""
        if self.uid is None or self.gid is None or not path.exists() or path.stat().st_uid == self.uid:
            return
        for folder, _, names in os.walk(path):
            for name in (".", *names):
                os.chown(os.path.join(folder, name), self.uid, self.gid, follow_symlinks=False)  # noqa: PTH118
        os.chown(path, self.uid, self.gid)


OWN_IDENTITY = Identity("plain")


def postgres_identity(mode: RootMode, data_dir: Path) -> Identity:
    if os.geteuid() != 0:
        return OWN_IDENTITY
    mapped = _account("daemon", "bin", "nobody")
    if mode is not RootMode.SETUID:
        args = ("--userns", f"{mapped.pw_uid}:{mapped.pw_gid}")
        if _can_launch(args):
            return Identity("userns", args, uid=0, gid=0)
        if mode is RootMode.USERNS:
            raise SetupFailed(
                "This host forbids user namespaces: set local.root-mode to setuid, or run Rota as a non-root user."
            )
    account = _account("postgres", "nobody")
    # The account must be able to traverse it; every sensitive file in it has its own permissions.
    data_dir.chmod(stat.S_IMODE(data_dir.stat().st_mode) | stat.S_IXOTH)
    if not _is_world_accessible(data_dir):
        raise SetupFailed(
            f"PostgreSQL cannot run as root, and the account {account.pw_name} cannot enter {data_dir}: "
            "set local.data-dir to a directory outside a private home, or run Rota as a non-root user."
        )
    return Identity("setuid", ("--setuid", f"{account.pw_uid}:{account.pw_gid}"), account.pw_uid, account.pw_gid)


def readable_bin_dir(bin_dir: Path, identity: Identity, data_dir: Path) -> Path:
    """`bin_dir`, or a copy of its installation that the account of `identity` can read."""
    if identity.mode != "setuid" or _is_world_accessible(bin_dir):
        return bin_dir
    install = bin_dir.parents[1]
    copy = data_dir / "postgres-install"
    if not (copy / ".complete").exists():
        shutil.rmtree(copy, ignore_errors=True)
        # The wheel's libraries are beside the package and loaded by a relative path.
        for source in (install, install.parent / f"{install.name}.libs"):
            if source.is_dir():
                shutil.copytree(source, copy / source.name, ignore=shutil.ignore_patterns("include", "__pycache__"))
        copy.chmod(0o755)
        (copy / ".complete").touch()
    return copy / install.name / bin_dir.relative_to(install)


def _account(*names: str) -> pwd.struct_passwd:
    for name in names:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise SetupFailed(f"None of the accounts {', '.join(names)} exists here: run Rota as a non-root user.")


def _can_launch(args: tuple[str, ...]) -> bool:
    argv = [sys.executable, "-I", "-S", str(LAUNCHER), "--parent", str(os.getpid()), "--deathsig", "9", *args]
    return subprocess.run([*argv, "--", "/bin/true"], capture_output=True, timeout=10, check=False).returncode == 0


def _is_world_accessible(path: Path) -> bool:
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in [path, *path.parents])

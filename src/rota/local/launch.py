"""Runs in the process of a server before it, then execs the server. Started as a file, without site packages.

    launch.py --parent PID --deathsig N [--userns UID:GID | --setuid UID:GID] [--stdin FILE] [--guard] -- ARGV...

Does the work between fork and exec here instead of in a `preexec_fn`, which is unsafe once the parent has threads.
Order matters: changing credentials clears the parent-death signal, so it is set last; the parent is checked after
that, because it may have died before the signal was armed.

`--guard` is for systems without a parent-death signal: this process stays, forwards signals, and stops the server when
the owner's end of its standard input closes, which the kernel does even after SIGKILL of the owner.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import ctypes

PR_SET_PDEATHSIG = 1
CLONE_NEWUSER = 0x10000000
GUARD_GRACE_S = 15


def main() -> NoReturn:
    options = _parse(sys.argv[1:])
    libc = _libc()
    if options.userns:
        _enter_user_namespace(libc, *options.userns)
    if options.setuid:
        _switch_user(*options.setuid)
    if options.guard:
        sys.exit(_guard(options.argv, options.deathsig, options.stdin))
    if options.stdin:
        os.dup2(os.open(options.stdin, os.O_RDONLY), 0)
    if libc:
        _die_with_parent(libc, options.deathsig, options.parent)
    os.execv(options.argv[0], options.argv)  # noqa: S606  an argv list, no shell


def _parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--deathsig", type=int, required=True)
    parser.add_argument("--userns", type=_uid_gid)
    parser.add_argument("--setuid", type=_uid_gid)
    parser.add_argument("--stdin", default="")
    parser.add_argument("--guard", action="store_true")
    parser.add_argument("argv", nargs="+")
    return parser.parse_args(args)


def _uid_gid(text: str) -> tuple[int, int]:
    uid, gid = text.split(":")
    return int(uid), int(gid)


def _libc() -> ctypes.CDLL | None:
    """Load it before the credentials change: the new account may not be able to read the library."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _enter_user_namespace(libc: ctypes.CDLL | None, uid: int, gid: int) -> None:
    """Become a non-root uid in a private user namespace; on disk the uid stays the same, without capabilities."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    if libc is None or libc.unshare(CLONE_NEWUSER) != 0:
        sys.exit("user namespaces are not allowed here")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {outer_uid} 1"),
        ("gid_map", f"{gid} {outer_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123  pathlib would double the start-up time
            file.write(text)


def _switch_user(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def _die_with_parent(libc: ctypes.CDLL, deathsig: int, parent: int) -> None:
    libc.prctl(PR_SET_PDEATHSIG, deathsig, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def _guard(argv: list[str], deathsig: int, stdin: str) -> int:
    forwarded = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    lock_fds = [fd for fd in range(3, 32) if _is_open(fd)]
    with open(stdin or os.devnull, "rb") as stdin_file:  # noqa: PTH123
        child = subprocess.Popen(argv, stdin=stdin_file, pass_fds=lock_fds)
    for number in forwarded:
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    threading.Thread(target=_stop_at_end_of_input, args=(child, deathsig), daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


def _stop_at_end_of_input(child: subprocess.Popen[bytes], deathsig: int) -> None:
    while os.read(0, 64):
        pass
    child.send_signal(deathsig)
    try:
        child.wait(GUARD_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()

"""The peers' own virtualenv: they are no dependency of Rota's, so they live outside of the tree.

`python -m bench setup` makes it, below the user's cache or where `ROTA_BENCH_PEERS` says, with the versions of
`peers.txt`. A peer that cannot be installed is absent: whoever wants figures against it is told so and why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PINS: Final = Path(__file__).with_name("peers.txt")
INSTALL_TIMEOUT_S: Final = 600
REQUIREMENTS: Final = {
    "pgqueuer": ("pgqueuer[asyncpg]", "uvloop"),
    "awa": ("awa-pg", "uvloop"),
    "procrastinate": ("procrastinate", "psycopg[binary,pool]", "uvloop"),
    "dramatiq": ("dramatiq[redis]",),
    "celery": ("celery[redis]",),
    "dbos": ("dbos", "uvloop"),
    "apscheduler": ("apscheduler", "sniffio", "sqlalchemy[asyncio]", "psycopg[binary]", "uvloop"),
}
"""What each peer is made of; the first is the peer itself. Versions are pinned in `peers.txt`."""


def home() -> Path:
    given = os.environ.get("ROTA_BENCH_PEERS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "rota" / "bench-peers"


def python() -> Path:
    return home() / "bin" / "python"


def version(peer: str) -> str:
    """The version that is raced."""
    return _pins()[_distribution(peer)]


def absence(peer: str) -> str | None:
    """Why a peer cannot take part, or None if it can."""
    name = f"{_distribution(peer).replace('-', '_')}-{version(peer)}.dist-info"
    if any(home().glob(f"lib/python*/site-packages/{name}")):
        return None
    return f"{_distribution(peer)} {version(peer)} is not installed: run `python -m bench setup`"


def missing(wanted: Sequence[str]) -> str:
    """Which of these peers are not installed, and how to get them; empty if none is."""
    lacking = [f"{_distribution(peer)} {version(peer)}" for peer in wanted if absence(peer)]
    if not lacking:
        return ""
    return (
        f"{', '.join(lacking)}. `python -m bench setup` installs them in {home()} (a minute or two, from the package"
        " index), --without-peers runs without them."
    )


def install() -> None:
    """Each peer on its own, so that one that cannot be had does not keep the others away."""
    if not python().exists():
        subprocess.run([sys.executable, "-m", "venv", str(home())], check=True, timeout=INSTALL_TIMEOUT_S)
    for peer, requirements in REQUIREMENTS.items():
        words = [str(python()), "-m", "pip", "install", "--quiet", "--constraint", str(PINS), *requirements]
        ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        said = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        missing = absence(peer)
        print(f"  {peer}: {'ready' if missing is None else f'ABSENT; {(said or [missing])[0]}'}")


def _distribution(peer: str) -> str:
    return REQUIREMENTS[peer][0].partition("[")[0]


def _pins() -> dict[str, str]:
    lines = (line.split("#", 1)[0].strip() for line in PINS.read_text().splitlines())
    return {name: pinned for name, _, pinned in (line.partition("==") for line in lines if line)}

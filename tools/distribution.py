"""Builds the wheel and the source distribution, checks what is in them, and measures what each extra installs.

`make dist` writes them to dist/. Versions are those of requirements.lock. Packages come from uv's cache, and from the
registry only if it lacks one, so that the tests that use this need no network after `make setup`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
EXTRAS = ("", "cli", "worker", "server", "local")
CORE_PACKAGES_MAX = 8
CORE_BYTES_MAX = 10_000_000
"""What is installed; bytecode, which pip compiles and uv does not, is measured apart."""
TIMEOUT_S = 240
DATA_SUFFIXES = (".sql", ".lua", ".proto")
_FOREIGN = re.compile(r"(^|/)(tests?|bench|docs|\.venv|__pycache__)/|\.pyc$")


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel and an extra."""

    path: Path
    packages: tuple[str, ...]
    bytes: int
    """Without bytecode."""

    def program(self, name: str) -> Path:
        return self.path / "bin" / name


def build(out: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    uv("build", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(out), str(ROOT))
    [wheel], [sdist] = out.glob("rota-*.whl"), out.glob("rota-*.tar.gz")
    return wheel, sdist


def problems_of(wheel: Path, sdist: Path) -> list[str]:
    """What is missing or does not belong there."""
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = set(opened.namelist())
    with tarfile.open(sdist) as opened_sdist:
        in_sdist = {name.partition("/")[2] for name in opened_sdist.getnames()}
    needed = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "rota").rglob("*")
        if path.suffix in (*DATA_SUFFIXES, ".py") or path.name == "py.typed"
    }
    problems = [f"{wheel.name}: {name} is missing" for name in sorted(needed - in_wheel)]
    problems += [f"{sdist.name}: src/{name} is missing" for name in sorted(needed) if f"src/{name}" not in in_sdist]
    for archive, names in ((wheel, in_wheel), (sdist, in_sdist)):
        problems += [f"{archive.name}: {name} does not belong there" for name in sorted(names) if _FOREIGN.search(name)]
    return problems


def install(wheel: Path, extra: str, where: Path) -> Installed:
    """The wheel with an extra ("": without), in a new virtual environment."""
    python = where / "bin" / "python"
    uv("venv", "--python", sys.executable, str(where))
    empty = _files(where)
    constraints = where / "constraints.txt"
    constraints.write_text("\n".join(_locked()))
    wanted = f"rota[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
    arguments = ("pip", "install", "--python", str(python), "--constraint", str(constraints), wanted)
    if uv(*arguments, "--offline", check=False):
        uv(*arguments)
    listed = uv_output("pip", "list", "--python", str(python), "--format", "freeze")
    packages = tuple(line.partition("==")[0].partition(" @")[0] for line in listed.split("\n") if line)
    return Installed(where, packages, sum(_files(where / "lib").values()) - sum(empty.values()))


def uv(*arguments: str, check: bool = True) -> int:
    ended = subprocess.run(
        [UV, "--quiet", *arguments], capture_output=True, check=False, cwd=ROOT, text=True, timeout=TIMEOUT_S
    )
    if check and ended.returncode:
        raise RuntimeError(f"uv {' '.join(arguments[:2])}: {ended.stderr.strip()}")
    return ended.returncode


def uv_output(*arguments: str) -> str:
    command = [UV, *arguments]
    return subprocess.run(command, capture_output=True, check=True, cwd=ROOT, text=True, timeout=TIMEOUT_S).stdout


def _locked() -> list[str]:
    """The versions of the lock file, with their markers."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [line.rstrip(" \\") for line in lines if "==" in line and not line.startswith((" ", "#"))]


def _files(folder: Path) -> dict[Path, int]:
    found = (path for path in folder.glob("**/site-packages/**/*") if path.is_file() and path.suffix != ".pyc")
    return {path: path.stat().st_size for path in found}


def main(arguments: Sequence[str]) -> int:
    out = Path(arguments[0] if arguments else ROOT / "dist")
    for old in out.glob("rota-*"):
        old.unlink()
    wheel, sdist = build(out)
    problems = problems_of(wheel, sdist)
    for path in (wheel, sdist):
        print(f"{path.name:<28} {path.stat().st_size / 1e6:6.1f} MB")
    print(f"\n{'':<14} packages     MB")
    with tempfile.TemporaryDirectory() as folder:
        for extra in EXTRAS:
            found = install(wheel, extra, Path(folder) / (extra or "core"))
            print(f"{f'rota[{extra}]' if extra else 'rota':<14} {len(found.packages):8} {found.bytes / 1e6:6.1f}")
            if not extra and (len(found.packages) > CORE_PACKAGES_MAX or found.bytes > CORE_BYTES_MAX):
                problems.append(f"rota alone may install {CORE_PACKAGES_MAX} packages and {CORE_BYTES_MAX / 1e6:g} MB")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

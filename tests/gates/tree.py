"""Checks of the source tree: sizes, unfinished code, lock files, paths, secrets, migration numbers. Read-only.

Every check takes the root of a tree and returns its problems, one line each, with the location.
"""

import ast
import fnmatch
import re
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
"""Longer files and functions are worth a look, but split by responsibility, not by size: these are warnings."""
FUNCTION_LINES_P95_MAX = 30

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX)\b|\bNotImplementedError\b")
MIGRATION = re.compile(r"(\d{4})_(?:pre|post)_[a-z0-9_]+\.sql")
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[^\]]*\])?==\S+")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?=\s|$)")

# Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home/[\w.-]+|Users/[\w.-]+)/")
REGISTRY = re.compile(
    r"python[h]osted\.org|https?://[^\s\"']+/simple(?![\w-])|registry\.npm[j]s|--(?:extra-)?index-url[ =]http"
)
SECRETS = {
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    "an AWS key": re.compile(r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36}"),
    "a web token": re.compile(r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\."),
    "a chat token": re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    "a URL with a password": re.compile(r"://[^\s:/@{}]*:(?P<value>[^\s@/{}\"']{16,})@"),
    "a password": re.compile(
        r"(?i:password|passwd|secret|token|api_?key)[\"']?\s*[:=]\s*[\"'](?P<value>[\w+/=.-]{20,})[\"']"
    ),
}


@dataclass
class Report:
    problems: list[str] = field(default_factory=list)
    note: str = ""


def files(root: Path) -> list[Path]:
    """Files of the project: tracked or addable by git; without git, all that .gitignore does not exclude."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    # Only if the tree is a repository itself, because it may be an ignored folder of another one.
    asked = subprocess.run(listed, capture_output=True, check=False) if (root / ".git").exists() else None
    if asked is None or asked.returncode != 0:
        return sorted(path for path in _walk(root, _ignored(root)) if path.is_file())
    named = [root / name for name in asked.stdout.decode().split("\0") if name]
    return sorted(path for path in named if path.is_file())


def _ignored(root: Path) -> list[str]:
    ignore = root / ".gitignore"
    lines = ignore.read_text().splitlines() if ignore.exists() else []
    return [".git", *(line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#"))]


def _walk(directory: Path, ignored: list[str]) -> Iterator[Path]:
    for path in directory.iterdir():
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path, ignored)
        else:
            yield path


def text_of(path: Path) -> str | None:
    """The file as text, or None if it is not text."""
    held = path.read_bytes()
    if b"\0" in held[:8192]:
        return None
    try:
        return held.decode()
    except UnicodeDecodeError:
        return None


def lines(root: Path, *patterns: str) -> Iterator[tuple[str, str]]:
    """Every line of text below `root` as ("path:number", text), of files whose path matches one of `patterns`."""
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if patterns and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            yield f"{name}:{number}", line


def sizes(root: Path) -> Report:
    report = Report()
    file_lines: list[int] = []
    function_lines: list[int] = []
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if not fnmatch.fnmatch(name, "src/*.py") or not (text := text_of(path)):
            continue
        file_lines.append(text.count("\n"))
        function_lines += [length for _, length in functions(text)]
    if p95(function_lines) > FUNCTION_LINES_P95_MAX:
        report.problems.append(f"functions have {p95(function_lines)} lines at p95, at most {FUNCTION_LINES_P95_MAX}")
    long_files = sum(length > FILE_LINES_MAX for length in file_lines)
    long_functions = sum(length > FUNCTION_LINES_MAX for length in function_lines)
    report.note = (
        f"{len(file_lines)} files, median {middle(file_lines)} lines (style 40-250); {len(function_lines)} functions, "
        f"median {middle(function_lines)} (5-9), p95 {p95(function_lines)} (at most {FUNCTION_LINES_P95_MAX}); "
        f"{long_files} files and {long_functions} functions are long"
    )
    return report


def functions(text: str) -> list[tuple[str, int]]:
    """Each function of a module with its length in lines, decorators not counted."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in found]


def middle(numbers: list[int]) -> int:
    return round(statistics.median(numbers)) if numbers else 0


def p95(numbers: list[int]) -> int:
    return sorted(numbers)[round(0.95 * (len(numbers) - 1))] if numbers else 0


def unfinished(root: Path) -> Report:
    patterns = ("src/*.py", "src/*.sql", "src/*.lua")
    return Report([f"{at}: {line.strip()}" for at, line in lines(root, *patterns) if UNFINISHED.search(line)])


def locks(root: Path) -> Report:
    report = Report()
    found = [path for path in files(root) if fnmatch.fnmatch(path.name, "requirements*.lock")]
    if not found:
        report.problems.append("no requirements*.lock: run `make lock`")
    for path in found:
        report.problems += [f"{path.name}: {problem}" for problem in lock_problems(path.read_text())]
    report.problems += [f"{path.name}: records hosts, keep it out" for path in files(root) if path.name == "uv.lock"]
    return report


def lock_problems(text: str) -> list[str]:
    """Problems that prevent a verified install of a lock file on any machine."""
    problems = [f"line {n} holds an address" for n, line in enumerate(text.splitlines(), 1) if "://" in line]
    for entry in text.replace("\\\n", " ").splitlines():
        words = entry.split("#", 1)[0].split()
        if not words:
            continue
        if not REQUIREMENT.fullmatch(words[0]):
            problems.append(f"{words[0]} is not pinned with ==")
        elif not HASH.search(entry):
            problems.append(f"{words[0]} has no sha256")
    return problems


def places(root: Path) -> Report:
    """No path of a specific machine and no package registry."""
    report = Report()
    for at, line in lines(root):
        if found := MACHINE_PATH.search(line):
            report.problems.append(f"{at}: path of one machine: {found[0]}")
        if found := REGISTRY.search(line):
            report.problems.append(f"{at}: package registry: {found[0]}")
    return report


def secrets(root: Path) -> Report:
    report = Report()
    for at, line in lines(root):
        # The match is not printed, because more people read the output of a gate than the file.
        report.problems += [f"{at}: looks like {kind}" for kind in secret_kinds(line)]
    return report


def secret_kinds(line: str) -> list[str]:
    found = [(kind, match) for kind, pattern in SECRETS.items() if (match := pattern.search(line))]
    return [kind for kind, match in found if "value" not in match.groupdict() or looks_random(match["value"])]


def looks_random(value: str) -> bool:
    """Whether the value looks generated: it has digits, lower-case and upper-case letters."""
    return bool(re.search(r"\d", value) and re.search(r"[a-z]", value) and re.search(r"[A-Z]", value))


def migrations(root: Path) -> Report:
    found = [path for path in files(root) if path.parent.name == "migrations" and path.suffix == ".sql"]
    named = {path: MIGRATION.fullmatch(path.name) for path in found}
    misnamed = [f"{path.name}: not NNNN_pre|post_slug.sql" for path, match in named.items() if not match]
    times = Counter(match[1] for match in named.values() if match)
    twice = [
        f"{path.relative_to(root).as_posix()}: number {match[1]} is used {times[match[1]]} times"
        for path, match in named.items()
        if match and times[match[1]] > 1
    ]
    return Report(misnamed + twice, f"{len(found)} migrations")

"""Checks of names and layout: folders, class names, vague words, SQL ownership, phrases. Read-only.

Every check takes the root of a tree and returns its problems, one line each.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.gates.tree import Report, files, text_of

FILES_PER_FOLDER_MAX = 25
CLASSES_SHARING_A_NAME_MAX = 40
VAGUE_PHRASES_MAX = 20

VAGUE_WORDS = frozenset({
    "bundle", "bundles", "buried", "bury", "desk", "door", "doors", "ender", "gated", "gatekeeper", "grave", "graves",
    "handing", "heirs", "judged", "leash", "leavings", "mend", "mended", "mending", "nobody", "piece", "pieces",
    "played", "portion", "rehearsed", "reopener", "said", "says", "seen", "somebody", "spot", "spots",
    "stranded", "swarm", "swarms", "tell", "teller", "telling", "tells", "told", "unheld", "untold", "upkeep",
    "wanted", "whiches", "whoever",
})  # fmt: skip
"""Metaphors and participles that say nothing about the thing they name; docs/glossary.md has the words to use."""

VAGUE_PHRASES = re.compile(r"\b(?:whoever|nobody|somebody|(?<!there )is no\b(?! longer))\b", re.IGNORECASE)
"""Subjects that name nothing, and "X is no Y" for "X is not a Y"."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
OTHERS_TABLES = {
    ("engine", "outbox"): "messages are written in the transaction they belong to",
    ("engine", "job_resource"): "a job's caps are written with the job and go with it",
    ("engine", "layer_resource"): "as those of its layers",
    ("engine", "workflow_news"): "a released output wakes the run that waits for it",
}
"""Tables that a package may write although another owns them, with the reason."""
_CREATES = re.compile(r"CREATE TABLE (?:IF NOT EXISTS )?rota\.(\w+)")
_WRITES = re.compile(r"\b(?:INSERT INTO|UPDATE|DELETE FROM|TRUNCATE(?: TABLE)?)\s+(?:ONLY\s+)?rota\.(\w+)")
_SQL_COMMENT = re.compile(r"--[^\n]*")


def source_files(root: Path, *suffixes: str) -> Iterator[tuple[str, str]]:
    """Files of the package with their text, by path relative to `root`."""
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if name.startswith("src/") and path.suffix in suffixes and (text := text_of(path)) is not None:
            yield name, text


def package_of(name: str) -> str:
    """The top-level package of a file: `src/rota/engine/dispatch/x.py` is of `engine`."""
    parts = name.split("/")[2:]
    return parts[0] if len(parts) > 1 else ""


def folders(root: Path) -> Report:
    count: dict[str, int] = defaultdict(int)
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if name.startswith(("src/", "tests/", "bench/", "tools/")) and path.name != "__init__.py":
            count[path.parent.relative_to(root).as_posix()] += 1
    full = {folder: n for folder, n in count.items() if n > FILES_PER_FOLDER_MAX}
    problems = [f"{folder}: {n} files, at most {FILES_PER_FOLDER_MAX}" for folder, n in sorted(full.items())]
    return Report(problems, f"{len(count)} folders, the fullest has {max(count.values(), default=0)} files")


def class_names(root: Path) -> Report:
    owners: dict[str, list[str]] = defaultdict(list)
    for name, text in source_files(root, ".py"):
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(name)
    problems = []
    for class_name, places in sorted(owners.items()):
        packages = [package_of(place) for place in places]
        if len(set(packages)) < len(packages):
            problems.append(f"{class_name} is defined more than once in a package: {', '.join(places)}")
    shared = sum(len(places) for places in owners.values() if len(places) > 1)
    if shared > CLASSES_SHARING_A_NAME_MAX:
        problems.append(f"{shared} classes share their name with another, at most {CLASSES_SHARING_A_NAME_MAX}")
    return Report(problems, f"{len(owners)} class names, {shared} classes share one")


def words_of(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def vague_names(root: Path) -> Report:
    problems = []
    for name, text in source_files(root, ".py"):
        module = Path(name).stem
        for line, what in [(1, module), *_names(ast.parse(text))]:
            if vague := VAGUE_WORDS.intersection(words_of(what)):
                problems.append(f"{name}:{line}: {what} says nothing with the word {min(vague)!r}")
    return Report(problems)


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Modules, classes, functions, parameters, attributes of objects and constants, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from ((argument.lineno, argument.arg) for argument in arguments)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from ((node.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def sql_files(root: Path) -> Report:
    """The statements of a package are in one `queries.sql`; migrations and functions have their own folders."""
    count: dict[str, list[str]] = defaultdict(list)
    for name, _ in source_files(root, ".sql"):
        path = Path(name)
        if path.parent.name not in ("migrations", "functions"):
            count[path.parent.as_posix()].append(path.name)
    problems = [f"{folder}: {', '.join(sorted(names))}" for folder, names in count.items() if names != ["queries.sql"]]
    return Report(problems, f"{len(count)} packages have statements")


def sql_writes(root: Path) -> Report:
    """A package writes its own tables only; the owner of a table is the package whose migration creates it."""
    sources = [(name, _SQL_COMMENT.sub("", text)) for name, text in source_files(root, ".sql")]
    owner = {
        table: _owner(name) for name, text in sources if "/migrations/" in name for table in _CREATES.findall(text)
    }
    problems = []
    for name, text in sources:
        for table in sorted(set(_WRITES.findall(text))):
            if owner.get(table, _owner(name)) != _owner(name) and (_owner(name), table) not in OTHERS_TABLES:
                problems.append(f"{name}: writes rota.{table}, which belongs to {owner[table]}")
    return Report(problems, f"{len(owner)} tables")


def _owner(name: str) -> str:
    """Packages own tables; those of infra and server are owned by their sub-packages."""
    package, sub = name.split("/")[2:4]
    return f"{package}/{sub}" if package in ("infra", "server") else package


def phrases(root: Path) -> Report:
    """Subjects that name nothing."""
    found = []
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if name.startswith(("src/", "docs/")) and (text := text_of(path)) is not None:
            for number, line in enumerate(text.splitlines(), 1):
                found += [f"{name}:{number}: {phrase}" for phrase in VAGUE_PHRASES.findall(line)]
    problems = [*found, f"{len(found)} vague phrases, at most {VAGUE_PHRASES_MAX}"]
    return Report(problems if len(found) > VAGUE_PHRASES_MAX else [], f"{len(found)} vague phrases")

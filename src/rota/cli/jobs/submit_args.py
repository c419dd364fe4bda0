"""Builds a `Submission` from the arguments of `rota submit`.

No I/O except reading a submission file and importing the app that declares the task.

An argument of the task is JSON if it parses as JSON, a keyword argument if it is `name=value`, and otherwise text.
Text that starts like JSON but does not parse is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from rota.accounting.resources import unknown_name_error
from rota.infra.yaml_reader import MappingNode, YamlFormat, YamlReader, error_at_line, parse_yaml, read_text
from rota.model.errors import InvalidInput
from rota.model.jobs.submission import (
    SUBMISSION_BYTES_MAX,
    AfterFailed,
    Budget,
    LayerSpec,
    LimitSpec,
    RetrySpec,
    Submission,
    decode_submission,
)
from rota.model.jobs.work import Work
from rota.model.units import parse_duration
from rota.sdk import load_app
from rota.sdk.task import Task

ACTOR_TYPE: Final = "human"
_KEYWORD_ARGUMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_LIMIT_FIELDS: Final = {"cpu": "cpu_s", "address": "address", "open-files": "open_files", "file-size": "file_size"}
_JSON_PREFIXES: Final = ("{", "[", '"')
# Larger and deeper than a valid submission, whose limits have sentences of their own.
_FILE_FORMAT: Final = YamlFormat(
    bytes_max=8 * SUBMISSION_BYTES_MAX, depth_max=48, streams=True, not_yaml="this is neither YAML nor JSON"
)


class SubmitArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The command line; None for options that were not given."""

    task: str | None = None
    words: Sequence[str] = ()
    argv: Sequence[str] = ()
    file: Path | None = None
    app: str | None = None
    app_folder: Path | None = None
    show: str = "default"
    folder: str | None = None
    dept: str | None = None
    topic: str | None = None
    name: str | None = None
    frames: str | None = None
    cores: str | None = None
    gpus: int | None = None
    memory: str | None = None
    priority: str | None = None
    labels: Sequence[str] = ()
    requires: Sequence[str] = ()
    retries: int | None = None
    timeout: str | None = None
    artifacts: Sequence[str] = ()
    limits: Sequence[str] = ()
    deadline: str | None = None
    max_wait: str | None = None
    max_cores: str | None = None
    after: Sequence[str] = ()
    after_failed: AfterFailed | None = None
    at: str | None = None
    key: str | None = None


def build_submission(args: SubmitArgs, actor: str, declared: Task[..., Any] | None = None) -> Submission:
    """Options take precedence over the task's declaration, and that over Rota's defaults."""
    if args.file is not None:
        if msgspec.structs.replace(args, file=None) != SubmitArgs():
            raise InvalidInput("A submission file excludes a task and all other options: omit them.")
        return _submission_from_file(args.file, actor)
    if bool(args.task) == bool(args.argv):
        raise InvalidInput(
            "There is no task or command, or both: use `rota submit TASK [ARGS]` or `rota submit -- COMMAND [ARGS]`."
        )
    job: dict[str, Any] = {
        "folder": args.folder,
        "dept": args.dept,
        "topic": args.topic or (declared.topic if declared else args.task),
        "name": args.name,
        "priority": _parse_priority(args.priority),
        "labels": parse_labels(args.labels),
        "requires": tuple(args.requires),
        "max_wait_s": _parse_seconds(args.max_wait),
        "max_cores": args.max_cores,
        "after_failed": args.after_failed,
        "run_at": _parse_start_time(args.at),
        "idempotency_key": args.key,
    }
    if args.deadline is not None:
        job["budget"] = Budget(deadline_ms=round(parse_duration(args.deadline) * 1000))
    layer = LayerSpec(**_layer_fields(args, declared.work if declared else None))
    return Submission(show=args.show, layers=(layer,), actor_id=actor, actor_type=ACTOR_TYPE, **_drop_unset(job))


def _submission_from_file(path: Path, actor: str) -> Submission:
    source = str(path)
    node = parse_yaml(read_text(path, _FILE_FORMAT), source, _FILE_FORMAT)
    if not isinstance(node, MappingNode):
        sentence = "this is not a submission: write a mapping with fields such as show and layers."
        raise error_at_line(source, node.line if node else 1, sentence)
    reader = YamlReader(source)
    fields: dict[str, object] = {"show": "default", "actor_id": actor, "actor_type": ACTOR_TYPE}
    for name, value in reader.pairs(node, "a submission"):
        fields[name] = reader.to_builtins(value, strict=True)
    try:
        # msgpack, because JSON cannot represent some numbers.
        content = msgspec.msgpack.encode(fields)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{path} is not a valid submission: {error}.") from error
    try:
        return decode_submission(content)
    except InvalidInput as error:
        if not isinstance(error.__cause__, msgspec.ValidationError):
            raise
        at, sentence = reader.locate(node, error.__cause__)
        raise reader.error(at, f"this is not a valid submission: {sentence}") from error


def _layer_fields(args: SubmitArgs, declared: Work | None) -> dict[str, Any]:
    given = {
        "task": args.task,
        "argv": tuple(args.argv),
        "input": parse_arguments(args.words),
        "frames": args.frames,
        "cores": args.cores,
        "gpus": args.gpus,
        "memory": args.memory,
        "retries": args.retries,
        "timeout_s": _parse_seconds(args.timeout),
        "artifacts": tuple(args.artifacts),
        "limits": parse_limits(args.limits) if args.limits else None,
    }
    return (_declared_fields(declared) if declared else {}) | _drop_unset(given)


def _declared_fields(work: Work) -> dict[str, Any]:
    """Fields of a layer as the task declares them."""
    tries = work.retries
    return {
        "cores": work.cores / 100,
        "gpus": work.gpus,
        "memory": f"{work.memory_mb}MiB" if work.memory_mb else "",
        "timeout_s": work.timeout_s,
        "kill_after_s": work.kill_after_s,
        "retries": RetrySpec(
            most=tries.most, first_s=tries.first_s, longest_s=tries.longest_s, on=tries.on, lost=tries.lost
        ),
    }


def _drop_unset(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != () and value != {}}


def load_declared_task(args: SubmitArgs) -> Task[..., Any] | None:
    """The task as its app declares it; None without `--app`."""
    if args.app is None:
        return None
    if args.task is None:
        raise InvalidInput("--app applies to tasks only: omit it for a command.")
    tasks = load_app.load(args.app, args.app_folder or Path.cwd()).tasks
    if args.task not in tasks:
        raise unknown_name_error("task", args.task, tasks)
    return tasks[args.task]


def parse_arguments(texts: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of the task."""
    args, kwargs = [], {}
    for text in texts:
        by_name = _KEYWORD_ARGUMENT.fullmatch(text)
        if by_name is None:
            args.append(_parse_value(text))
        elif by_name[1] in kwargs:
            raise InvalidInput(f"The argument {by_name[1][:64]} is repeated: give it once.")
        else:
            kwargs[by_name[1]] = _parse_value(by_name[2])
    return {"args": args, "kwargs": kwargs} if texts else None


def _parse_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        if text.lstrip().startswith(_JSON_PREFIXES):
            shown = text if len(text) <= 40 else f"{text[:37]}..."
            raise InvalidInput(f"The argument {shown} is not valid JSON: {str(error)[:200].rstrip('.')}.") from None
        return text


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidInput(f"{text[:64]!r} is not a valid label: use key=value.")
        found[key] = value
    return found


def parse_limits(texts: Sequence[str]) -> LimitSpec:
    given: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in _LIMIT_FIELDS or not value:
            raise InvalidInput(
                f"{text[:64]!r} is not a valid limit: use one of {', '.join(_LIMIT_FIELDS)} with =VALUE."
            )
        given[_LIMIT_FIELDS[name]] = value
    if "cpu_s" in given:
        given["cpu_s"] = math.ceil(parse_duration(given["cpu_s"]))
    if "open_files" in given:
        if not _NUMBER.fullmatch(given["open_files"]):
            raise InvalidInput(f"{given['open_files'][:64]!r} is not a valid number of open files: use a whole number.")
        given["open_files"] = int(given["open_files"])
    return LimitSpec(**given)


def _parse_priority(text: str | None) -> int | str | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else text


def _parse_seconds(text: str | None) -> float | None:
    return None if text is None else parse_duration(text)


def _parse_start_time(text: str | None) -> datetime | None:
    """An ISO 8601 time, in the local time zone unless it names one, or a duration from now."""
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC) + timedelta(seconds=parse_duration(text))
    return at.astimezone()

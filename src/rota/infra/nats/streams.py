"""Declarations of streams and consumers, and their NATS configuration. Pure: `JetStream.ensure` applies them.

    SYS = StreamSpec(name="SYS", subjects=("sys.>",))
    RESULTS = ConsumerSpec(stream="SYS", durable="engine", filter="sys.job.result")

Names omit the bus's prefix; `NatsNames` adds and removes it. A size or time of None is unlimited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from rota.model.errors import InvalidSetting, SetupFailed

Config = dict[str, Any]
"""A configuration in NATS's JSON form: durations in nanoseconds, -1 for unlimited."""

SUBJECT_MAX: Final = 255
"""Longer subjects are rejected here: the server closes the connection when its control line is too long."""
UNLIMITED_DELIVERIES: Final = 1_000_000_000
"""Never reached in practice. Older servers reject NATS's own "unlimited" together with `backoff_s`."""
_SUBJECT = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*")
_PATTERN = re.compile(r"(?:[^\s.*>]+|\*)(?:\.(?:[^\s.*>]+|\*))*(?:\.>)?|>")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DAY_S = 86_400.0

# Settings that NATS cannot change on an existing stream, with the phrase for the error message.
_IMMUTABLE_STREAM_FIELDS = {"retention": "retains its messages by", "storage": "stores its messages in"}


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    subjects: tuple[str, ...]
    retention: Literal["limits", "interest", "workqueue"] = "limits"
    storage: Literal["file", "memory"] = "file"
    discard: Literal["old", "new"] = "old"
    max_age_s: float | None = 7 * _DAY_S
    max_bytes: int | None = None
    max_msgs: int | None = None
    dedup_window_s: float = 120.0
    """How long NATS remembers a message id. A relay that was down for longer may store a message twice."""
    replicas: int = 1

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name!r} cannot name a stream"
        assert self.subjects, f"stream {self.name} takes no subject"
        for subject in self.subjects:
            assert _PATTERN.fullmatch(subject), f"stream {self.name}: {subject!r} is not a subject"
        if self.max_age_s is not None and self.dedup_window_s > self.max_age_s:
            raise InvalidSetting(
                f"Stream {self.name} would keep message ids for {self.dedup_window_s:g} s and messages for only "
                f"{self.max_age_s:g} s: make the dedup window the shorter one."
            )

    def accepts(self, subject: str) -> bool:
        return any(subject_matches(pattern, subject) for pattern in self.subjects)


class ConsumerSpec(msgspec.Struct, frozen=True, kw_only=True):
    stream: str
    durable: str
    filter: str | None = None
    deliver: Literal["all", "new"] = "all"
    """Where a new consumer starts: at the oldest message, or at the next one."""
    ack_wait_s: float = 600.0
    backoff_s: tuple[float, ...] = ()
    """Ack waits of the first deliveries, instead of `ack_wait_s`; the last one applies to the rest."""
    max_deliver: int = 100
    """Deliveries to a handler. From this delivery on `Delivery.last` is set."""
    spare_deliveries: int = UNLIMITED_DELIVERIES
    """Deliveries beyond `max_deliver`, for retrying a dead letter that could not be written. After them NATS drops the
    message from the consumer, with only an advisory."""
    max_ack_pending: int = 2048
    forgotten_after_s: float | None = None
    """NATS removes the consumer after this long without a reader; for temporary readers."""

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.durable), f"{self.durable!r} cannot name a consumer"
        assert self.filter is None or _PATTERN.fullmatch(self.filter), f"{self.filter!r} is not a subject"
        assert self.max_deliver >= 1, f"consumer {self.durable} must deliver at least once"
        assert self.spare_deliveries >= 0, f"consumer {self.durable}: spare deliveries cannot be negative"
        assert len(self.backoff_s) <= self.server_max_deliver, f"consumer {self.durable}: more waits than deliveries"

    @property
    def server_max_deliver(self) -> int:
        """NATS stops delivering a message after this many deliveries and publishes an advisory."""
        return self.max_deliver + self.spare_deliveries

    def ack_wait_of(self, delivery: int) -> float:
        """How long NATS waits for the acknowledgement of delivery number `delivery` (from 1)."""
        if not self.backoff_s:
            return self.ack_wait_s
        return self.backoff_s[min(delivery, len(self.backoff_s)) - 1]

    @property
    def shortest_ack_wait_s(self) -> float:
        return min(self.backoff_s, default=self.ack_wait_s)


class NatsNames(msgspec.Struct, frozen=True):
    """Adds and removes the prefix of stream names and subjects."""

    prefix: str

    def stream(self, name: str) -> str:
        return f"{self.prefix}_{name}" if self.prefix else name

    def subject(self, subject: str) -> str:
        return f"{self.prefix.lower()}.{subject}" if self.prefix else subject

    def bare_stream(self, name: str) -> str:
        return name.removeprefix(f"{self.prefix}_") if self.prefix else name

    def bare_subject(self, subject: str) -> str:
        return subject.removeprefix(f"{self.prefix.lower()}.") if self.prefix else subject


def subject_matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to `pattern` receives `subject`."""
    pattern_parts, parts = pattern.split("."), subject.split(".")
    for index, part in enumerate(pattern_parts):
        if part == ">":
            return index < len(parts)
        if index >= len(parts) or part not in ("*", parts[index]):
            return False
    return len(pattern_parts) == len(parts)


def subject_fault(subject: str) -> str | None:
    """Why publishing to `subject` is impossible, or None."""
    if len(subject.encode(errors="replace")) > SUBJECT_MAX:
        return f"the subject is longer than {SUBJECT_MAX} bytes"
    if not _SUBJECT.fullmatch(subject) or not subject.isprintable():
        return f"{subject!r} is not a valid subject: use words joined by dots, without spaces or wildcards"
    return None


def stream_config(spec: StreamSpec, names: NatsNames) -> Config:
    return {
        "name": names.stream(spec.name),
        "subjects": [names.subject(subject) for subject in spec.subjects],
        "retention": spec.retention,
        "storage": spec.storage,
        "discard": spec.discard,
        "max_age": _nanoseconds(spec.max_age_s or 0),
        "max_bytes": _or_unlimited(spec.max_bytes),
        "max_msgs": _or_unlimited(spec.max_msgs),
        "duplicate_window": _nanoseconds(spec.dedup_window_s),
        "num_replicas": spec.replicas,
    }


def consumer_config(spec: ConsumerSpec, names: NatsNames) -> Config:
    config: Config = {
        "name": spec.durable,
        "durable_name": spec.durable,
        "deliver_policy": spec.deliver,
        "ack_policy": "explicit",
        "replay_policy": "instant",
        "ack_wait": _nanoseconds(spec.ack_wait_of(1)),
        "max_deliver": spec.server_max_deliver,
        "max_ack_pending": spec.max_ack_pending,
    }
    if spec.filter is not None:
        config["filter_subject"] = names.subject(spec.filter)
    if spec.forgotten_after_s is not None:
        config["inactive_threshold"] = _nanoseconds(spec.forgotten_after_s)
    if spec.backoff_s:
        config["backoff"] = [_nanoseconds(wait_s) for wait_s in spec.backoff_s]
    return config


def stream_update(existing: Mapping[str, Any], declared: Config) -> Config | None:
    """The configuration that turns `existing` into `declared`, or None when they agree. Undeclared settings stay.

    Raises SetupFailed for settings that NATS cannot change: deleting a stream is left to the operator.
    """
    for key, phrase in _IMMUTABLE_STREAM_FIELDS.items():
        if existing.get(key) != declared[key]:
            raise SetupFailed(
                f"Stream {declared['name']} {phrase} {existing.get(key)!r}, and NATS cannot change that to "
                f"{declared[key]!r} in place: delete the stream once it is drained "
                f"(`nats stream rm {declared['name']}`); it is re-created at the next start.",
                stream=declared["name"],
            )
    if all(existing.get(key) == value for key, value in declared.items()):
        return None
    return {**existing, **declared}


def stream_for(subject: str, specs: Iterable[StreamSpec]) -> StreamSpec | None:
    """The declared stream that accepts `subject`."""
    return next((spec for spec in specs if spec.accepts(subject)), None)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1_000_000_000)


def _or_unlimited(limit: int | None) -> int:
    return -1 if limit is None else limit

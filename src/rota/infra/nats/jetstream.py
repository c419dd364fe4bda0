"""The JetStream API: JSON requests about streams and consumers, and `ensure`.

Called directly, because the client library drops unknown fields when it writes a configuration back. Every step of
`ensure` is idempotent and may run on several replicas concurrently: creating an identical stream succeeds in NATS, and
the last of two updates wins. After a crash between two steps, the next start does the rest. Nothing here deletes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import structlog

from rota.infra.nats import failures
from rota.infra.nats.connection import NatsConnection
from rota.infra.nats.failures import ApiError
from rota.infra.nats.streams import (
    Config,
    ConsumerSpec,
    NatsNames,
    StreamSpec,
    consumer_config,
    stream_config,
    stream_update,
)
from rota.model.errors import NatsUnavailable, SetupFailed

log = structlog.get_logger(__name__)

API: Final = "$JS.API"
_NAME_IN_USE = 10058
_NO_MESSAGE = 10037
_NO_STREAM = 10059
_JETSTREAM_OFF = (10039, 10076)


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as stored in its stream."""

    subject: str
    data: bytes
    stream_seq: int
    stored_ns: int
    """When it was stored; together with the sequence unique, even across a re-created stream."""


class StreamState(msgspec.Struct, frozen=True):
    """The current state of a stream."""

    mark: str
    """Its creation time: identifies this incarnation of the stream, because a re-created one has another."""
    first_seq: int
    last_seq: int
    messages: int = 0
    bytes: int = 0
    consumer_count: int = 0


class _ApiResponse(msgspec.Struct):
    error: ApiError | None = None


class _RawStoredMessage(msgspec.Struct):
    subject: str
    seq: int
    time: str
    data: bytes = b""


class _GetMessageResponse(msgspec.Struct):
    message: _RawStoredMessage


class JetStream:
    def __init__(self, connection: NatsConnection, names: NatsNames) -> None:
        self._connection = connection
        self._names = names

    async def check(self) -> None:
        """Raise SetupFailed when JetStream is disabled, NatsUnavailable when it does not answer."""
        reply = await self._call("INFO")
        if isinstance(reply, ApiError):
            if reply.err_code in _JETSTREAM_OFF:
                raise SetupFailed(
                    f"NATS at {self._address} runs without JetStream: add `jetstream {{}}` to its configuration and "
                    "restart it."
                )
            raise self._api_failure("the account cannot be read", reply)

    async def ensure(self, streams: Iterable[StreamSpec], consumers: Iterable[ConsumerSpec]) -> None:
        """Create every declared stream and consumer; update existing ones that differ, where NATS allows it."""
        for stream in streams:
            await self._ensure_stream(stream_config(stream, self._names))
        for consumer in consumers:
            await self._ensure_consumer(consumer)

    async def get_message(self, stream: str, stream_seq: int) -> StoredMessage | None:
        """The message with that sequence number, or None when the stream no longer has it."""
        return await self._get_message(stream, {"seq": stream_seq}, f"message {stream_seq}")

    async def _get_message(self, stream: str, selector: Config, description: str) -> StoredMessage | None:
        reply = await self._call(f"STREAM.MSG.GET.{self._names.stream(stream)}", selector)
        if isinstance(reply, ApiError):
            if reply.err_code in (_NO_MESSAGE, _NO_STREAM):
                return None
            raise self._api_failure(f"{description} of stream {stream} cannot be read", reply)
        found = msgspec.convert(reply, _GetMessageResponse).message
        subject = self._names.bare_subject(found.subject)
        return StoredMessage(
            subject=subject, data=found.data, stream_seq=found.seq, stored_ns=parse_time_ns(found.time)
        )

    async def last_message(self, stream: str, subject: str) -> StoredMessage | None:
        """The latest message of one subject in the stream."""
        return await self._get_message(stream, {"last_by_subj": self._names.subject(subject)}, f"the last {subject}")

    async def stream_state(self, stream: str) -> StreamState | None:
        """None when the stream does not exist."""
        reply = await self._call(f"STREAM.INFO.{self._names.stream(stream)}")
        if isinstance(reply, ApiError):
            if reply.err_code == _NO_STREAM:
                return None
            raise self._api_failure(f"stream {stream} cannot be read", reply)
        return msgspec.convert({**reply["state"], "mark": f"{parse_time_ns(reply['created']):x}"}, StreamState)

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """The subjects matching a pattern that have messages in the stream."""
        body = {"subjects_filter": self._names.subject(pattern)}
        reply = await self._call(f"STREAM.INFO.{self._names.stream(stream)}", body)
        if isinstance(reply, ApiError):
            if reply.err_code == _NO_STREAM:
                return []
            raise self._api_failure(f"stream {stream} cannot be read", reply)
        return sorted(self._names.bare_subject(subject) for subject in reply["state"].get("subjects") or ())

    async def create_push_consumer(
        self, stream: str, inbox: str, seq: int, heartbeat_s: float, forgotten_after_s: float
    ) -> None:
        """Push messages from sequence `seq` on to `inbox`, for as long as it has a subscriber."""
        name = self._names.stream(stream)
        config = {
            "deliver_subject": inbox,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": seq,
            "ack_policy": "none",
            "replay_policy": "instant",
            "idle_heartbeat": round(heartbeat_s * 1e9),
            "inactive_threshold": round(forgotten_after_s * 1e9),
            "mem_storage": True,
            "num_replicas": 1,
        }
        created = await self._call(f"CONSUMER.CREATE.{name}", {"stream_name": name, "config": config})
        if isinstance(created, ApiError):
            raise NatsUnavailable(f"Stream {stream} cannot be read now: {created.description}.")

    async def ack_floor(self, spec: ConsumerSpec) -> int | None:
        """The sequence up to which all messages are acknowledged; None when nothing is pending."""
        reply = await self._call(f"CONSUMER.INFO.{self._names.stream(spec.stream)}.{spec.durable}")
        if isinstance(reply, ApiError):
            raise NatsUnavailable(f"Consumer {spec.durable} cannot be read now: {reply.description}.")
        if reply["num_pending"] == 0 and reply["num_ack_pending"] == 0:
            return None
        return int(reply["ack_floor"]["stream_seq"])

    async def _ensure_stream(self, declared: Config) -> None:
        name = declared["name"]
        created = await self._call(f"STREAM.CREATE.{name}", declared)
        if not isinstance(created, ApiError):
            return
        if created.err_code != _NAME_IN_USE:
            raise self._api_failure(f"stream {name} cannot be created", created)
        found = await self._call(f"STREAM.INFO.{name}")
        if isinstance(found, ApiError):
            raise self._api_failure(f"stream {name} cannot be read", found)
        update = stream_update(found["config"], declared)
        if update is None:
            return
        updated = await self._call(f"STREAM.UPDATE.{name}", update)
        if isinstance(updated, ApiError):
            raise self._api_failure(f"stream {name} cannot be updated", updated)
        log.info("stream_updated", stream=name)

    async def _ensure_consumer(self, spec: ConsumerSpec) -> None:
        stream = self._names.stream(spec.stream)
        config = consumer_config(spec, self._names)
        # This form works with servers from 2.9 on, with and without a filter.
        method = f"CONSUMER.DURABLE.CREATE.{stream}.{spec.durable}"
        created = await self._call(method, {"stream_name": stream, "config": config})
        if not isinstance(created, ApiError):
            return
        if "can not be updated" in created.description:
            raise SetupFailed(
                f"Consumer {spec.durable} of stream {stream} cannot be changed in place ({created.description}): "
                f"delete it (`nats consumer rm {stream} {spec.durable}`) or declare it under a new name.",
                stream=stream,
                consumer=spec.durable,
            )
        raise self._api_failure(f"consumer {spec.durable} of stream {stream} cannot be created", created)

    async def _call(self, method: str, body: Config | None = None) -> Config | ApiError:
        data = await self._connection.request(f"{API}.{method}", msgspec.json.encode(body) if body is not None else b"")
        reply: dict[str, Any] = msgspec.json.decode(data)
        error = msgspec.convert(reply, _ApiResponse).error
        return reply if error is None else error

    def _api_failure(self, what: str, error: ApiError) -> SetupFailed | NatsUnavailable:
        return failures.on_api_error(error, what, self._address)

    @property
    def _address(self) -> str:
        return self._connection.target.address


def parse_time_ns(time: str) -> int:
    """Nanoseconds since 1970 of a JetStream timestamp such as 2026-01-31T12:00:00.000000001Z."""
    second, _, fraction = time.removesuffix("Z").partition(".")
    moment = datetime.fromisoformat(second).replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1_000_000_000 + int(fraction.ljust(9, "0"))

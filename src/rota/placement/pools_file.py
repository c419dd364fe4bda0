"""The parser of `pools.yaml`: topics and pools.

    topics:
      job.resize: default
      job.train: [gpu, cloud]        # the second when the first is full
      "render.*": farm
    pools:
      gpu: {requires: [docker, gpu]} # what it provides
      farm: {status: draining, drain_timeout_seconds: 600}

Every scalar is read as text and every key must be known, so a typo is rejected with its line instead of ignored. Pools
must also exist in accounting; `RouteStore.load` checks that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from rota.model.errors import InvalidInput
from rota.placement.requirements import normalize_capabilities
from rota.placement.topic_routes import DRAIN_TIMEOUT_MAX_S, DRAIN_TIMEOUT_S, PoolSpec, PoolStatus

FILE_BYTES_MAX: Final = 1024 * 1024
TOPIC_PATTERN = re.compile(r"[\w.:/*-]{1,200}", re.ASCII)
POOLS_PER_TOPIC_MAX: Final = 100
"""Maximum number of pools of one topic."""


class PoolsFile(msgspec.Struct, frozen=True):
    topics: dict[str, tuple[str, ...]] = {}
    pools: dict[str, PoolSpec] = {}

    def digest(self) -> bytes:
        """Digest of the content; comments and the order of keys do not matter."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).digest()


def read_pools_file(path: Path) -> PoolsFile:
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) <= FILE_BYTES_MAX:
            return parse_pools_file(content.decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"The file {path} cannot be read as text: check its path and content.") from error
    raise InvalidInput(f"The file {path} has more than {FILE_BYTES_MAX // 1024} KiB: check that it is the right file.")


def parse_pools_file(text: str, source: str = "pools.yaml") -> PoolsFile:
    """The parsed content; raises InvalidInput with the line of the first error."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InvalidInput(f"{source}:{line}: this is not valid YAML: {error.problem}.") from None
    except yaml.YAMLError:
        raise InvalidInput(f"{source}: this is not valid YAML: it holds characters that are not allowed.") from None
    return _PoolsFileReader(source).document(document)


def validate_topic(topic: str) -> str:
    if not TOPIC_PATTERN.fullmatch(topic):
        raise InvalidInput(
            f"{topic[:60]!r} is not a valid topic: use up to 200 letters, digits and . _ - : /, and * for any text."
        )
    return topic


def validate_pools(topic: str, pools: tuple[str, ...]) -> tuple[str, ...]:
    if not pools or len(pools) > POOLS_PER_TOPIC_MAX or len(set(pools)) < len(pools):
        raise InvalidInput(f"The topic {topic} needs a list of distinct pools: give 1 to {POOLS_PER_TOPIC_MAX}.")
    return pools


class _PoolsFileReader:
    def __init__(self, source: str) -> None:
        self._source = source

    def document(self, node: yaml.Node | None) -> PoolsFile:
        topics: dict[str, tuple[str, ...]] = {}
        pools: dict[str, PoolSpec] = {}
        for key, value in self._pairs(node, "the file"):
            if key == "topics":
                topics = {topic: self._topic(topic, each) for topic, each in self._pairs(value, "topics")}
            elif key == "pools":
                pools = {name: self._pool(name, each) for name, each in self._pairs(value, "pools")}
            else:
                raise self._error(value, f"{key!r} is not a known key: use topics and pools")
        return PoolsFile(topics, pools)

    def _topic(self, topic: str, node: yaml.Node) -> tuple[str, ...]:
        names = self._scalar_list(node) if isinstance(node, yaml.SequenceNode) else (self._scalar(node),)
        try:
            return validate_pools(validate_topic(topic), names)
        except InvalidInput as error:
            raise self._error(node, error.sentence.rstrip(".")) from None

    def _pool(self, name: str, node: yaml.Node) -> PoolSpec:
        fields: dict[str, tuple[str, Callable[[yaml.Node], object]]] = {
            "requires": ("provides", lambda value: normalize_capabilities(self._scalar_list(value))),
            "status": ("status", self._status),
            "description": ("description", self._scalar),
            "drain_started_at": ("drain_started_ms", self._moment_ms),
            "drain_timeout_seconds": ("drain_timeout_s", self._seconds),
        }
        properties: dict[str, object] = {}
        for key, value in self._pairs(node, f"the pool {name}"):
            if key not in fields:
                raise self._error(value, f"{key!r} is not a property of a pool: use {', '.join(fields)}")
            field, parse = fields[key]
            properties[field] = parse(value)
        spec = PoolSpec(name=name, **properties)  # type: ignore[arg-type]  # each reader gives its field's type
        drains = spec.status is PoolStatus.DRAINING
        return spec if drains else msgspec.structs.replace(spec, drain_started_ms=None, drain_timeout_s=DRAIN_TIMEOUT_S)

    def _status(self, node: yaml.Node) -> PoolStatus:
        try:
            return PoolStatus(self._scalar(node).lower())
        except ValueError:
            raise self._error(node, f"this is not a status: use one of {', '.join(PoolStatus)}") from None

    def _moment_ms(self, node: yaml.Node) -> int:
        try:
            moment = datetime.fromisoformat(self._scalar(node))
        except ValueError:
            raise self._error(node, "drain_started_at is not a time: write it like 2030-01-31T12:00:00Z") from None
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)

    def _seconds(self, node: yaml.Node) -> int:
        text = self._scalar(node)
        if not re.fullmatch(r"[0-9]{1,5}", text, re.ASCII) or not 1 <= int(text) <= DRAIN_TIMEOUT_MAX_S:
            raise self._error(node, f"drain_timeout_seconds is out of range: give 1 to {DRAIN_TIMEOUT_MAX_S}")
        return int(text)

    def _pairs(self, node: yaml.Node | None, what: str) -> Iterator[tuple[str, yaml.Node]]:
        if node is None or (isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")):
            return
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, f"{what} must be a mapping of names")
        keys: set[str] = set()
        for key_node, value in node.value:
            key = self._scalar(key_node)
            if key in keys:
                raise self._error(key_node, f"{key!r} occurs twice: remove one")
            keys.add(key)
            yield key, value

    def _scalar_list(self, node: yaml.Node) -> tuple[str, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, "a list is required here: write it like [docker, gpu]")
        return tuple(self._scalar(each) for each in node.value)

    def _scalar(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
            raise self._error(node, "a text value is required here")
        return str(node.value).strip()

    def _error(self, node: yaml.Node, sentence: str) -> InvalidInput:
        return InvalidInput(f"{self._source}:{node.start_mark.line + 1}: {sentence}.")

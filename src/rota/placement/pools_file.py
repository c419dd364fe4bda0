"""The parser of `pools.yaml`: topics and pools.

    topics:
      job.resize: default
      job.train: [gpu, cloud]        # the second when the first is full
      "render.*": farm
    pools:
      gpu: {requires: [docker, gpu]} # what it provides
      cloud: {placement: pack}       # fit, spread or pack
      farm: {status: draining, drain_timeout_seconds: 600}

Every scalar is read as text and every key must be known, so a typo is rejected with its line instead of ignored. Pools
must also exist in accounting; `RouteStore.load` checks that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from rota.infra.yaml_reader import (
    ListNode,
    ScalarNode,
    YamlFormat,
    YamlNode,
    YamlReader,
    check_size,
    parse_yaml,
    read_prefix,
)
from rota.model.errors import InvalidInput
from rota.placement.requirements import normalize_capabilities
from rota.placement.topic_routes import DRAIN_TIMEOUT_MAX_S, DRAIN_TIMEOUT_S, PlacementPolicy, PoolSpec, PoolStatus

_FORMAT: Final = YamlFormat(not_yaml="this is not valid YAML")
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
        content = read_prefix(path, _FORMAT)
        check_size(content, str(path), _FORMAT)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"The file {path} cannot be read as text: check its path and content.") from error
    return parse_pools_file(text, str(path))


def parse_pools_file(text: str, source: str = "pools.yaml") -> PoolsFile:
    """The parsed content; raises InvalidInput with the line of the first error."""
    return _PoolsFileReader(source).document(parse_yaml(text, source, _FORMAT))


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


class _PoolsFileReader(YamlReader):
    def document(self, node: YamlNode | None) -> PoolsFile:
        topics: dict[str, tuple[str, ...]] = {}
        pools: dict[str, PoolSpec] = {}
        for key, value in self.pairs(node, "the file"):
            if key == "topics":
                topics = {topic: self._topic(topic, each) for topic, each in self.pairs(value, "topics")}
            elif key == "pools":
                pools = {name: self._pool(name, each) for name, each in self.pairs(value, "pools")}
            else:
                raise self.error(value, f"{key!r} is not a known key: use topics and pools")
        return PoolsFile(topics, pools)

    def _topic(self, topic: str, node: YamlNode) -> tuple[str, ...]:
        names = self._text_list(node) if isinstance(node, ListNode) else (self._text(node),)
        try:
            return validate_pools(validate_topic(topic), names)
        except InvalidInput as error:
            raise self.error(node, error.sentence.rstrip(".")) from None

    def _pool(self, name: str, node: YamlNode) -> PoolSpec:
        fields: dict[str, tuple[str, Callable[[YamlNode], object]]] = {
            "requires": ("provides", lambda value: normalize_capabilities(self._text_list(value))),
            "status": ("status", self._status),
            "description": ("description", self._text),
            "placement": ("placement", self._placement),
            "drain_started_at": ("drain_started_ms", self._moment_ms),
            "drain_timeout_seconds": ("drain_timeout_s", self._seconds),
        }
        properties: dict[str, object] = {}
        for key, value in self.pairs(node, f"the pool {name}"):
            if key not in fields:
                raise self.error(value, f"{key!r} is not a property of a pool: use {', '.join(fields)}")
            field, parse = fields[key]
            properties[field] = parse(value)
        spec = PoolSpec(name=name, **properties)  # type: ignore[arg-type]  # each reader gives its field's type
        drains = spec.status is PoolStatus.DRAINING
        return spec if drains else msgspec.structs.replace(spec, drain_started_ms=None, drain_timeout_s=DRAIN_TIMEOUT_S)

    def _status(self, node: YamlNode) -> PoolStatus:
        try:
            return PoolStatus(self._text(node).lower())
        except ValueError:
            raise self.error(node, f"this is not a status: use one of {', '.join(PoolStatus)}") from None

    def _placement(self, node: YamlNode) -> PlacementPolicy:
        try:
            return PlacementPolicy(self._text(node).lower())
        except ValueError:
            raise self.error(node, f"this is not a placement: use one of {', '.join(PlacementPolicy)}") from None

    def _moment_ms(self, node: YamlNode) -> int:
        try:
            moment = datetime.fromisoformat(self._text(node))
        except ValueError:
            raise self.error(node, "drain_started_at is not a time: write it like 2030-01-31T12:00:00Z") from None
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)

    def _seconds(self, node: YamlNode) -> int:
        text = self._text(node)
        if not re.fullmatch(r"[1-9][0-9]{0,4}", text, re.ASCII) or int(text) > DRAIN_TIMEOUT_MAX_S:
            raise self.error(node, f"drain_timeout_seconds is a decimal number: give 1 to {DRAIN_TIMEOUT_MAX_S}")
        return int(text)

    def _text_list(self, node: YamlNode) -> tuple[str, ...]:
        if not isinstance(node, ListNode):
            raise self.error(node, "a list is required here: write it like [docker, gpu]")
        return tuple(self._text(each) for each in node.items)

    def _text(self, node: YamlNode) -> str:
        if not isinstance(node, ScalarNode) or not node.text.strip():
            raise self.error(node, "a text value is required here")
        return node.text.strip()

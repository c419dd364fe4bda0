"""Bookings as script arguments: the keys they touch, and groups packed into one argument.

A charge is sent and stored as text, `alloc folder job layer dept cores gpus`, so that a token shows what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from rota.accounting.ledger import BookingBatch, BookingGroup, Charge
from rota.infra.redis import ShowRedisKeys
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId
from rota.model.quota import LEVELS, Level
from rota.model.token_ranges import to_spans
from rota.model.units import Centicores

SPAN_BITS: Final = 7
SPAN: Final = 1 << SPAN_BITS
"""Tokens per bucket; `SPAN` in the scripts. A hash of this size stays a listpack: 8 bytes a token instead of 60."""
LEVEL_OF_PREFIX: Final = dict(zip(("sub", "folder", "job", "layer", "point"), LEVELS, strict=True))
PREFIX_OF_LEVEL: Final = {level: prefix for prefix, level in LEVEL_OF_PREFIX.items()}

_ID = "([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"
_STORED_CHARGE = re.compile(rf"([0-9]{{1,15}}) [0-9]{{1,16}} ({' '.join([_ID] * 5)} ([0-9]{{1,15}}) ([0-9]{{1,15}}))")

PackedGroup = tuple[int | str | list[int] | list[str], ...]


class StoredCharge(msgspec.Struct, frozen=True):
    tokens: int
    text: str
    charge: Charge


class ScriptArguments(msgspec.Struct, frozen=True):
    """A batch, ready to be sent: keys of counters first, then keys of buckets."""

    places: list[str]
    packed: tuple[list[PackedGroup], list[int]]


def pack_arguments(keys: ShowRedisKeys, groups: BookingBatch, must_know: Sequence[int | None]) -> ScriptArguments:
    """`must_know` per group: which of job (1) and layer (2) have limits; None omits their keys."""
    index_of: dict[str, int] = {}
    packed: list[PackedGroup] = []
    buckets: dict[int, None] = {}
    for group, known in zip(groups, must_know, strict=True):
        charge = group.charge
        charged = (str(charge.alloc), str(charge.folder), str(charge.job), str(charge.layer), str(charge.dept))
        names = keys.shared_counter_keys(charged) if known is None else keys.counter_keys(charged)
        places = [index_of.setdefault(key, len(index_of) + 1) if key else 0 for key in names]
        shared = (*places, charge.cores, charge.gpus)
        spans = _pack_ranges(group.tokens, buckets)
        suffix = f" {charged[4]} {charge.cores} {charge.gpus}"
        if isinstance(group, BookingGroup):
            packed.append((*shared, " ".join(charged[:4]) + suffix, known or 0, spans))
        else:
            middles = [f"{job} {layer}" for job, layer in zip(group.jobs, group.layers, strict=True)]
            packed.append((*shared, f"{charged[0]} {charged[1]} ", 0, spans, middles, suffix))
    numbers = sorted(buckets)
    return ScriptArguments([*index_of, *map(keys.tokens, numbers)], (packed, numbers))


def _pack_ranges(tokens: Sequence[int], buckets: dict[int, None]) -> list[int]:
    """First and last token of each range, flattened; adds the buckets of the tokens to `buckets`."""
    spans: list[int] = []
    for first, last in to_spans(tokens):
        spans += (first, last)
        for bucket in range(first >> SPAN_BITS, (last >> SPAN_BITS) + 1):
            buckets[bucket] = None
    return spans


def parse_charge(stored: str) -> StoredCharge | None:
    """Parse a value of `acct:charges`: token count, fence, charge. None if no script wrote it."""
    found = _STORED_CHARGE.fullmatch(stored)
    if found is None:
        return None
    tokens, text, alloc, folder, job, layer, dept, cores, gpus = found.groups()
    charge = Charge(
        PoolId(UUID(alloc)),
        FolderId(UUID(folder)),
        JobId(UUID(job)),
        LayerId(UUID(layer)),
        DeptId(UUID(dept)),
        Centicores(int(cores)),
        int(gpus),
    )
    return StoredCharge(int(tokens), text, charge)


def counter_name(level: Level, item: UUID) -> str:
    """The short name of an item with counters."""
    return f"{PREFIX_OF_LEVEL[level]}:{item}"


def parse_counter_name(name: str) -> tuple[Level, UUID]:
    prefix, _, item = name.partition(":")
    return LEVEL_OF_PREFIX[prefix], UUID(item)


def counter_names(charge_text: str) -> list[str]:
    """Short names of the counters of a charge."""
    return [f"{prefix}:{item}" for prefix, item in zip(LEVEL_OF_PREFIX, charge_text.split(" "), strict=False)]

"""Bookings as the scripts take them: which keys they touch, and groups of numbers and text in one packed argument.

A charge travels and is stored as text, `alloc folder job layer dept cores gpus`, so that a token tells what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from rota.accounting.ledger import Charge, Group, runs
from rota.infra.redis import ShowKeys
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId
from rota.model.quota import LEVELS, Level
from rota.model.units import Centicores

SPAN_BITS: Final = 7
SPAN: Final = 1 << SPAN_BITS
"""Tokens of one bucket; `SPAN` in the scripts. A hash of this size stays packed: 8 bytes a token instead of 60."""
SHORT: Final = dict(zip(("sub", "folder", "job", "layer", "point"), LEVELS, strict=True))
WORD: Final = {level: word for word, level in SHORT.items()}

Packed = tuple[int | str | list[int], ...]


class Wired(msgspec.Struct, frozen=True):
    """A batch, ready to be sent: keys of counters first, keys of buckets behind them."""

    places: list[str]
    packed: tuple[list[Packed], list[int]]


def wired(keys: ShowKeys, groups: Sequence[Group], must_know: Sequence[int | None]) -> Wired:
    """`must_know` per group: which of job (1) and layer (2) have limits; None leaves their places out."""
    at: dict[str, int] = {}
    packed: list[Packed] = []
    buckets: dict[int, None] = {}
    for group, known in zip(groups, must_know, strict=True):
        charge = group.charge
        charged = (str(charge.alloc), str(charge.folder), str(charge.job), str(charge.layer), str(charge.dept))
        names = keys.counting_of(charged) if known is not None else keys.shared_of(charged)
        places = [at.setdefault(key, len(at) + 1) if key else 0 for key in names]
        spans: list[int] = []
        for first, last in runs(group.tokens):
            spans += (first, last)
            for bucket in range(first >> SPAN_BITS, (last >> SPAN_BITS) + 1):
                buckets[bucket] = None
        text = f"{' '.join(charged)} {charge.cores} {charge.gpus}"
        packed.append((*places, charge.cores, charge.gpus, text, known or 0, spans))
    numbers = sorted(buckets)
    return Wired([*at, *map(keys.tokens, numbers)], (packed, numbers))


def charge_of(text: str) -> Charge:
    alloc, folder, job, layer, dept, cores, gpus = text.split(" ")
    return Charge(
        PoolId(UUID(alloc)),
        FolderId(UUID(folder)),
        JobId(UUID(job)),
        LayerId(UUID(layer)),
        DeptId(UUID(dept)),
        Centicores(int(cores)),
        int(gpus),
    )


def name(level: Level, thing: UUID) -> str:
    """The short name of something with counters."""
    return f"{WORD[level]}:{thing}"


def named(name: str) -> tuple[Level, UUID]:
    word, _, thing = name.partition(":")
    return SHORT[word], UUID(thing)


def names_of(charge_text: str) -> list[str]:
    """Short names of what a charge counts in."""
    return [f"{word}:{thing}" for word, thing in zip(SHORT, charge_text.split(" "), strict=False)]

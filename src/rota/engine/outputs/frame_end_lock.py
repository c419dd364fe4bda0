"""Locks the ends of frames for a verdict, wherever retention moves them.

Retention carries the end of a frame to the partition of a later day: it deletes the row and inserts it again. A
statement that waited for that transaction finds the old row gone and does not see the new one, so a verdict would be
applied to nothing, and its output would stay held without a scan. The next statement sees the new row. Once a row is
locked, retention waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rota.infra.postgres import Transaction, query
from rota.model.ids import LayerId

LOCK = query(__package__, "outputs_lock")

FrameEndKey = tuple[LayerId, int, int, datetime]
"""Layer, frame, token, and a time from before the end."""


async def lock_frame_ends(tx: Transaction, keys: Sequence[FrameEndKey]) -> set[int]:
    """Lock these ends until the transaction ends; returns the tokens of those that are retained."""
    missing = list(keys)
    locked: set[int] = set()
    for _ in range(2):
        if missing:
            rows = await tx.rows(LOCK, *(list(column) for column in zip(*missing, strict=True)))
            locked |= {row["token"] for row in rows}
            missing = [key for key in missing if key[2] not in locked]
    return locked

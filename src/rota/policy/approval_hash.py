"""What people approve, as one hash: the only canonicaliser there is. No I/O.

It is made of what was submitted, as it is stored: columns that nobody writes again, and bytes as they were written, so
neither a round trip nor a newer version of Rota changes it. Left out is what is not the submitter's: labels that begin
with `approval_`, and the trace that it belongs to. Names of shows, folders and departments may change; their ids stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec

HASH_VERSION: Final = "rota.job.1"
APPROVAL_LABEL_PREFIX: Final = "approval_"
JOB_COLUMNS: Final = ("pk_show", "pk_folder", "pk_dept", "job_name", "topic", "priority", "workflow_id", "run_at_us")
LAYER_COLUMNS: Final = (
    *("number", "str_name", "work", "input", "input_at", "first_frame", "frame_step", "frames"),
    *("ranges", "items", "place"),
)


class NamedColumns(Protocol):
    """A row by the names of its columns."""

    def __getitem__(self, name: str, /) -> Any: ...


_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode


def job_hash(job: NamedColumns, layers: Sequence[NamedColumns]) -> bytes:
    """Of a row of a job, and those of its layers in order, as approval_material.sql reads them."""
    assert layers, "a job has a layer"
    labels: dict[str, str] = msgspec.json.decode(job["labels"]) if job["labels"] else {}
    kept = {name: value for name, value in labels.items() if not name.lower().startswith(APPROVAL_LABEL_PREFIX)}
    details: dict[str, Any] = msgspec.msgpack.decode(job["request"]) if job["request"] else {}
    details.pop("trace", None)
    columns = [_plain(job[name]) for name in JOB_COLUMNS]
    told = [[_plain(layer[name]) for name in LAYER_COLUMNS] for layer in layers]
    return sha256(_ENCODE([HASH_VERSION, columns, kept, details, told])).digest()


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | bytes | list) else str(value)

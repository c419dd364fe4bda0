"""The hash of what people approve; the only canonicalization. No I/O.

Hashes the stored submission: immutable columns, and bytes as written, so neither a round trip nor a newer version of
Rota changes the hash. Excludes data that is not the submitter's: labels that start with `approval_`, and the trace.
Uses the ids of shows, folders and departments, because their names may change.
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
    """A row with access by column name."""

    def __getitem__(self, name: str, /) -> Any: ...


_ENCODE = msgspec.msgpack.Encoder(order="deterministic").encode


def job_hash(job: NamedColumns, layers: Sequence[NamedColumns]) -> bytes:
    """Hash the row of a job and the ordered rows of its layers, as the query approval_material reads them."""
    assert layers, "a job has a layer"
    labels: dict[str, str] = msgspec.json.decode(job["labels"]) if job["labels"] else {}
    user_labels = {name: value for name, value in labels.items() if not name.lower().startswith(APPROVAL_LABEL_PREFIX)}
    details: dict[str, Any] = msgspec.msgpack.decode(job["request"]) if job["request"] else {}
    details.pop("trace", None)
    columns = [_plain(job[name]) for name in JOB_COLUMNS]
    layer_columns = [[_plain(layer[name]) for name in LAYER_COLUMNS] for layer in layers]
    return sha256(_ENCODE([HASH_VERSION, columns, user_labels, details, layer_columns])).digest()


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | bytes | list) else str(value)

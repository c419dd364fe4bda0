"""Environment variables of a frame. No I/O.

A command inherits only `INHERITED_VARIABLES` from the worker: no credentials, and the same names on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from uuid import UUID

INHERITED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
TRACE_VARIABLE = "TRACEPARENT"


def frame_variables(
    job: UUID | str, layer: UUID | str, frame: int, attempt: int, gpus: tuple[int, ...], trace: str = ""
) -> dict[str, str]:
    """Identifies the frame. A frame without GPUs gets an empty CUDA_VISIBLE_DEVICES, which hides them all."""
    devices = ",".join(map(str, gpus))
    traceparent = {TRACE_VARIABLE: trace} if trace else {}
    return {
        "ROTA_JOB": str(job),
        "ROTA_LAYER": str(layer),
        "ROTA_FRAME": str(frame),
        "ROTA_ATTEMPT": str(attempt),
        "ROTA_GPUS": devices,
        "CUDA_VISIBLE_DEVICES": devices,
        **traceparent,
    }


def command_environment(declared: Mapping[str, str], frame: Mapping[str, str], folder: str) -> dict[str, str]:
    """The whole environment of a command; declared variables override inherited ones."""
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    return {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", **inherited, "TMPDIR": folder, **declared, **frame}

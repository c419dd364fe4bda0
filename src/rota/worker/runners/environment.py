"""What a frame finds in its environment. No I/O.

A command gets nothing of the worker's own environment but a few names that programs cannot do without: no credentials
of the worker, and the same on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from uuid import UUID

INHERITED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def frame_variables(
    job: UUID, layer: UUID, frame: int, attempt: int, gpus: tuple[int, ...], trace: str = ""
) -> dict[str, str]:
    """Which frame this is. Without GPUs of its own it sees none, where drivers listen to that."""
    devices = ",".join(map(str, gpus))
    traced = {"TRACEPARENT": trace} if trace else {}
    return {
        "ROTA_JOB": str(job),
        "ROTA_LAYER": str(layer),
        "ROTA_FRAME": str(frame),
        "ROTA_ATTEMPT": str(attempt),
        "ROTA_GPUS": devices,
        "CUDA_VISIBLE_DEVICES": devices,
        **traced,
    }


def command_environment(declared: Mapping[str, str], about: Mapping[str, str], folder: str) -> dict[str, str]:
    """The whole environment of a command; what the submission declares wins over what is inherited."""
    kept = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    return {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", **kept, "TMPDIR": folder, **declared, **about}

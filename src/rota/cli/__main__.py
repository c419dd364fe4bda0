"""The `rota` command, also as `python -m rota.cli`. Without its extra it says what to install."""

from __future__ import annotations

import sys

from rota.infra.extras import needs_extra
from rota.model.errors import ExtraMissing


def main() -> None:
    try:
        with needs_extra("cli", "The `rota` command"):
            from rota.cli.main import main as run
    except ExtraMissing as error:
        sys.exit(f"rota: {error.sentence} [{error.code}]")
    run()


if __name__ == "__main__":
    main()

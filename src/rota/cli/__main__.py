"""`python -m rota.cli` is the same as `rota`."""

from rota.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m rota.cli`: the same as `rota`."""

from rota.cli.app import main

if __name__ == "__main__":
    main()

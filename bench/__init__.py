"""The one way to measure: `python -m bench NAME [--quick]`. See README.md beside this file for the latest tables."""

"""Generators of the reference pages in docs/reference; tests/unit/docs compares each page with its source."""

"""Shared test support: real servers once per run, fresh databases per test, failing networks, helpers."""

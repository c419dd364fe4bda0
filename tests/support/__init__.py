"""The ground tests stand on: real servers once per run, a fresh place in each per test, bad networks."""

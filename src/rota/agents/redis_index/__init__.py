"""Agents that are due and agents that run, as sorted sets in Redis: one Lua script per transition.

Redis only finds candidates. PostgreSQL decides which run begins, so a wrong entry costs a round trip and never a
second run.
"""

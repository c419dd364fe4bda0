"""Redis or Valkey: the pooled client, Lua scripts with a checked contract, key names, the server's clock.

    client             connects with a bounded pool and no retries; refuses servers that are too old or evict keys
    keys               every key name; nothing else builds one
    script             loads and calls a Lua file; `script_contract` parses its header, `script_args` and
                       `script_reply` check each call and reply against it
    server_time        the server's clock, cached
    failures           maps client errors to Rota's errors; states whether the outcome is known
    target             URL, pool size and timeouts

Invariants: every wait has a timeout; a command is never retried here, because its effect may have happened; Redis
holds no data that PostgreSQL cannot rebuild. Callers: accounting/live, agents, infra/breaker, placement, policy,
server, workflow.
"""

from rota.infra.redis.client import PoolUse, check_server, connect, health, pool_use
from rota.infra.redis.failures import translate_errors
from rota.infra.redis.keys import AgentRedisKeys, RedisKeys, ShowRedisKeys
from rota.infra.redis.script import Script, script
from rota.infra.redis.server_time import RedisServerTime
from rota.infra.redis.target import RedisTarget

__all__ = [
    "AgentRedisKeys",
    "PoolUse",
    "RedisKeys",
    "RedisServerTime",
    "RedisTarget",
    "Script",
    "ShowRedisKeys",
    "check_server",
    "connect",
    "health",
    "pool_use",
    "script",
    "translate_errors",
]

"""Redis or Valkey: the pooled client, Lua scripts with a contract, names of keys, the server's clock."""

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

"""Redis or Valkey: the pooled client, Lua scripts with a contract, names of keys, the server's clock."""

from rota.infra.redis.client import PoolUse, check_fit, connect, health, pool_use
from rota.infra.redis.failures import guard
from rota.infra.redis.keys import AgentKeys, Keys, ShowKeys
from rota.infra.redis.script import Script, script
from rota.infra.redis.server_time import ServerTime
from rota.infra.redis.target import RedisTarget

__all__ = [
    "AgentKeys",
    "Keys",
    "PoolUse",
    "RedisTarget",
    "Script",
    "ServerTime",
    "ShowKeys",
    "check_fit",
    "connect",
    "guard",
    "health",
    "pool_use",
    "script",
]

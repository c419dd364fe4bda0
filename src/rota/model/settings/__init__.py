"""Settings: one typed, frozen tree, and how it comes about.

* `Settings()` is the defaults. `resolve` merges a file and the environment over them (environment over file over
  default), refuses unknown names with the nearest known one, and reports all problems at once.
* Keys may be written in kebab, snake or camel case. In the environment a setting is `ROTA_` and its path; those
  that have an older name there keep it too.
* Times are held in seconds as floats and written with a unit (`2s`), except where the name ends in `-ms`,
  `-millis` or `-seconds`: those are whole numbers of that unit.
* Values that may hold a secret are shown masked by `rows`, in errors and in reprs of what is derived from them.

The tree is built once at start and never changes; whoever needs a setting is handed its section.
Reading the file and the environment is `rota.infra.settings_file`.
"""

from rota.model.settings.leaves import Leaf, leaves, value_at
from rota.model.settings.listing import SettingRow, rows
from rota.model.settings.redis_use import RedisClientConfig, RedisPurpose, redis_for
from rota.model.settings.resolve import LoadedSettings, SettingOrigin, SettingsFileEntry, UnsupportedValue, resolve
from rota.model.settings.tree import Settings

__all__ = [
    "Leaf",
    "LoadedSettings",
    "RedisClientConfig",
    "RedisPurpose",
    "SettingOrigin",
    "SettingRow",
    "Settings",
    "SettingsFileEntry",
    "UnsupportedValue",
    "leaves",
    "redis_for",
    "resolve",
    "rows",
    "value_at",
]

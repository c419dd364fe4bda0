"""Settings: one typed, frozen tree, and how it is resolved.

* `Settings()` has the defaults. `resolve` merges a file and the environment over them (environment over file over
  default), refuses unknown names with the nearest known one, and reports all problems together.
* Keys may be written in kebab, snake or camel case. The environment variable of a setting is `ROTA_` and its path;
  some settings also have an older name.
* Durations are stored in seconds as floats and written with a unit (`2s`), except where the name ends in `-ms`,
  `-millis` or `-seconds`: those are whole numbers of that unit.
* Values that may contain a secret are masked in `rows`, in errors, and in reprs of derived objects.

The tree is built once at start and is immutable; components receive their section as an argument.
`rota.infra.settings_file` reads the file and the environment.
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

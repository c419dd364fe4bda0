"""Code that all commands share. No command is defined here.

| module | content |
|---|---|
| `options` | shared Typer options, loading of the settings |
| `output`, `output_format` | printing of text, tables, JSON, YAML and errors |
| `tables` | `CliPage` and the quota tables |
| `resolve_ids` | id, id prefix or name to id |
| `usage_errors` | Typer's usage errors in Rota's error format |
| `exit_codes` | exit statuses and their meanings |
"""

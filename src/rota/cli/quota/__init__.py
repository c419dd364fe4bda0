"""`rota show`, `pool`, `sub`, `folder` and `dept`, and the caps of `rota job` and `rota layer`.

Limits are stored in PostgreSQL; usage is read from Redis for managed shows. Also holds helpers that other packages use:
`actions.current_actor` (the audit actor), `actions.print_page` and `options.command_group`.
"""

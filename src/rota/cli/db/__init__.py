"""`rota db` and `rota audit`; `open_database` is how every command reaches PostgreSQL."""

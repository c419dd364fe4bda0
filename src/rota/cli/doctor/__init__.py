"""`rota doctor`: read-only health checks. `checks` and `policy_checks` collect the facts, `view` grades them."""

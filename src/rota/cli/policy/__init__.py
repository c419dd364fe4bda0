"""`rota policy`: checks, tests, simulates, explains and reloads the policy."""

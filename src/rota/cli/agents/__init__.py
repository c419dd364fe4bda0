"""`rota agents`: lists and controls recurring agents, in PostgreSQL and Redis."""

"""`rota queue`: counts, pausing and storage of the queues, directly in PostgreSQL."""

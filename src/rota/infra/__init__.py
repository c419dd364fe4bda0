"""How the outside is reached: PostgreSQL, Redis, NATS, signals, time, and who holds which lease."""

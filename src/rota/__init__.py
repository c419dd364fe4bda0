"""Rota: a distributed job scheduler that keeps exact books."""

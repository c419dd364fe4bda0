"""Runs frames: async functions on its loop, sync functions in processes, commands. Speaks to NATS alone."""

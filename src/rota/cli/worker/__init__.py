"""`rota worker`: builds a worker from the command line and the settings, and runs it until a signal."""

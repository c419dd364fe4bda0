"""gRPC between our own processes.

Nothing is imported here: `auth` and `calls` bring gRPC along, and only who serves or calls pays for it.
"""

"""gRPC between our own processes.

Nothing is imported here: `rota.infra.rpc.auth` brings gRPC along, and only who serves or calls pays for it.
"""

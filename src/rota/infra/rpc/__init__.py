"""gRPC between Rota's processes.

    calls      the server: binding, TLS, error mapping
    auth       shared-secret interceptors for server and client
    protobuf   the wire format, without generated code

Nothing is imported here, because `auth` and `calls` import grpc, which only servers and clients of gRPC need.
Invariant: a call without the shared secret reaches no method, except on a loopback server configured without one.
Callers: policy kernel and its client, server (`shows`).
"""

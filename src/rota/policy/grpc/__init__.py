"""The policy engine over gRPC: `rota kernel` serves `safety.proto`, and servers call it.

client           `RemoteKernel` and `RemoteOutputKernel`: timeouts, breaker, validation of replies
service          the gRPC services, backed by `LocalKernel`
messages         the protobuf messages and their conversion to and from the model
request_cache    codecs that encode and decode each distinct request and decision once
kernel_process   the process of `rota kernel`

Invariant: a reply that is late, malformed or unknown never allows a job (`client`, `messages`).
"""

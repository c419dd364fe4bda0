"""The policy kernel over gRPC: messages of `safety.proto`, the service, its client with a breaker, and the process."""

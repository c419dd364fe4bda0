"""What every request passes before a handler, and errors pass after it.

authentication   checks the key and the rate limit before the app sees the request
encoded_slashes  `%2F` inside a path segment
rate_limit       requests in flight, waiting requests
request_tokens   requests per second per key, over all servers
errors           exceptions as problem documents
"""

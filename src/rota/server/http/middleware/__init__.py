"""What every request passes before a handler, and errors pass after it.

authentication   checks the key and the rate limit before the app sees the request
rate_limit       requests per second per key, requests in flight, waiting requests
errors           exceptions as problem documents
"""

"""HTTP client of the Rota API, used by the SDK and the command line.

| module | subject |
|---|---|
| `http` | retries, timeouts, streams, decoding |
| `endpoint_client`, `response_stream` | requests to one endpoint, and responses that are read while they arrive |
| `connector`, `connection_pool`, `connection` | connections to it, directly or through a proxy |
| `coalescer` | concurrent single submissions in one request |
| `errors` | API errors as exceptions |
| `endpoint`, `discovery`, `connections` | the endpoint, from settings or `rota up`; one transport per event loop |
| `transport`, `jobs` | the interface the SDK needs for jobs, and its HTTP implementation |
| `events`, `log_stream` | resumable event and log streams |
| `resource` | base of the resource classes, async and sync |
| `admin_client` | the resources of an app: `app.shows`, `app.sync.shows` |
| `shows`, `pools`, `agents`, `approvals`, `outputs`, `admin` | the resources |

Invariants: no request is executed twice unless it is idempotent (`http`); every request has a timeout; the API key is
sent to its own endpoint only.
"""

"""The HTTP API, served under `/api/v1` by the listener of every replica. See docs/adr/0017-the-faces.md.

    listener ─► middleware.authentication (key, rate limit) ─► permissions.authorize (role) ─► routes ─► engine
                                                         └─► fast_path (role; whole submissions) ─┘

app                 the Litestar app: all routes, error handlers, body limits
middleware          authentication, rate limits, errors as problem documents
fast_path           one submission that has arrived whole, answered without Litestar
permissions         role and scope of each route
dependencies        the parts of a replica that handlers use
routes              one module per resource
codec, bulk_body    JSON and msgpack bodies; bodies with many submissions
job_filter          the filter language of job lists
pagination          pages and cursors
visibility          checks and redaction per show
sse, open_streams   server-sent events; which key has which streams open
problem_details     errors as problem documents
openapi             the OpenAPI document

Invariants and who enforces them:
- No unauthenticated request reaches the app: `middleware.authentication` checks the key before it looks at path,
  parameters or body; `middleware.rate_limit` bounds the requests of each key and of all keys.
- A handler reads and changes only what the key's role allows: each route declares its role and scope
  (`permissions.requires`), a guard checks them before the handler runs, and `app` fails to build if a route has none.
- A job in a show that the key cannot view gets the same response as an unknown id: `visibility`.
- Every error is a problem document with a stable code and one sentence: `problem_details`.
- The API adds no rules: handlers call the engine, accounting and the queue, and return their results.
- Every change is in the audit log under the principal and the id of the key; a submission carries the principal.

If the server dies between the effect and the response, the client does not know the outcome: it can repeat a submission
with the same idempotency key; after other calls it reads the state.
"""

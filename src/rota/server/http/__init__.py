"""The HTTP API: `/api/v1`, on the listener of every replica. See docs/adr/0017-the-faces.md.

What holds, and who sees to it:
- nothing is answered to strangers: `door` asks for a key before any path, parameter or body is looked at, and takes
  from each key and from all together only so much at once;
- a handler sees and changes only what the key's role allows: each route names its role and where that is needed
  (`routes.needs`), a guard asks for it before the handler, and an app with a route that names none cannot be built;
- jobs of a show that the key may not look into are not there: the answer is that for an id nobody has;
- every refusal is a problem document with a stable code and one sentence: `problems`;
- a face adds no rules. Handlers call what the engine, the books and the queue offer, and hand on what these say;
- every change is in the audit trail under the name of the key, but for submissions, which carry it as `principal`.

If we die between the effect and the answer the caller does not know what happened: submissions may be repeated under
their idempotency key, everything else by looking.
"""

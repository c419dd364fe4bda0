-- Leases with fencing tokens. See ADR 4.

-- One sequence for all names, so that a fence is never issued twice, even if the row of a name was pruned meanwhile.
CREATE SEQUENCE rota.lease_fence;

-- The fillfactor leaves room for renewals in the same page (HOT updates), so that they write no index.
CREATE TABLE rota.lease (
  name        text PRIMARY KEY,
  fence       bigint NOT NULL DEFAULT 0,
  holder      text,
  acquired_at timestamptz,
  expires_at  timestamptz NOT NULL DEFAULT '-infinity',
  wanted      boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);

COMMENT ON COLUMN rota.lease.fence IS 'Fencing token of the last grant; every write under the lease carries it.';

COMMENT ON COLUMN rota.lease.expires_at IS
  'Measured by the clock of this server only; -infinity: released, or never held.';

COMMENT ON COLUMN rota.lease.wanted IS
  'Another process waits for the lease, so its release notifies the channel rota_lease.';

-- Fenced leases. See docs/adr/0004-fenced-leases.md.

-- One counter for all names: a fence is never issued twice, not even when a name's row was pruned in between.
CREATE SEQUENCE rota.lease_fence;

CREATE TABLE rota.lease (
  name        text PRIMARY KEY,
  fence       bigint NOT NULL DEFAULT 0,
  holder      text,
  acquired_at timestamptz,
  expires_at  timestamptz NOT NULL DEFAULT '-infinity',
  wanted      boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);

  -- room for renewals in the same page, so that they touch no index

COMMENT ON COLUMN rota.lease.fence IS 'Number of the last grant; every write made under the lease carries it.';

COMMENT ON COLUMN rota.lease.expires_at IS 'By the clock of this server alone; -infinity: released, or never held.';

COMMENT ON COLUMN rota.lease.wanted IS 'Somebody waits, so releasing notifies the channel rota_lease.';

-- Jobs of a lane take turns: what is left of a long one is put aside after its turn.
ALTER TABLE rota.queue_returned ADD COLUMN turn_of uuid;

COMMENT ON COLUMN rota.queue_returned.turn_of IS
  'The rest of this job, put aside so that the others of its lane have their turn. Rests are claimed in the order of returned_at, which is when the job had its last turn. Null: returned, claimed before anything else.';

ALTER TABLE rota.queues ADD COLUMN by_job boolean NOT NULL DEFAULT true;

COMMENT ON COLUMN rota.queues.by_job IS
  'Jobs take turns. False, in strict order, once entries with a key were queued: they must be claimed in order.';

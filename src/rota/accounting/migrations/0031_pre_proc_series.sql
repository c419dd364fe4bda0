-- Frames in series on one booking (ADR 23): they run one after the other, and the row of the last one has the charge.
ALTER TABLE rota.proc ADD COLUMN series_first bigint;
ALTER TABLE rota.proc ADD COLUMN b_ended boolean NOT NULL DEFAULT false;

COMMENT ON COLUMN rota.proc.series_first IS
  'The first token of the series whose charge this row holds: the frames from there to this token share it. Null: none.';
COMMENT ON COLUMN rota.proc.b_ended IS
  'The frame of this row has ended, and the row holds the charge for earlier frames of its series that have not.';

-- What the end of frames did: `tokens` are rows that were deleted, `ended` the frames that ended by it.
CREATE TYPE rota.proc_ended AS (
  managed boolean, fence bigint, pk_alloc uuid, pk_folder uuid, pk_job uuid, pk_layer uuid, pk_dept uuid,
  cores bigint, gpus bigint, tokens bigint[], ended bigint[]
);

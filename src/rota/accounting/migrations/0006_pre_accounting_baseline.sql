-- Accounting in PostgreSQL: limits, usage counters, and the procs that they count. See ADR 9.
-- Cores are in hundredths of a core in every column; a cap of -1 means unlimited.

-- One sequence for all rows with limits, so that a version is never reused when a row is deleted and created again.
CREATE SEQUENCE rota.limit_version;

CREATE TABLE rota.show (
  pk_show             uuid PRIMARY KEY,
  str_name            text NOT NULL UNIQUE,
  b_scheduler_managed boolean NOT NULL DEFAULT false,
  int_fence           bigint NOT NULL DEFAULT 1 CHECK (int_fence > 0),
  int_founded         bigint NOT NULL DEFAULT 1 CHECK (int_founded <= int_fence),
  int_version         bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  ts_created          timestamptz NOT NULL DEFAULT now(),
  int_max_jobs integer NOT NULL DEFAULT -1 CHECK (int_max_jobs >= -1)
);

COMMENT ON COLUMN rota.show.b_scheduler_managed IS
  'Managed show: the ledger in Redis decides its quota; otherwise PostgreSQL does.';

COMMENT ON COLUMN rota.show.int_fence IS 'Increases when the state of this show in Redis may no longer be used.';

COMMENT ON COLUMN rota.show.int_founded IS
  'Fence at which Redis last had to be seeded; a state seeded under a lower fence may lack procs.';

CREATE TABLE rota.alloc (
  pk_alloc    uuid PRIMARY KEY,
  str_name    text NOT NULL UNIQUE,
  int_version bigint NOT NULL DEFAULT nextval('rota.limit_version')
);

CREATE TABLE rota.dept (
  pk_dept     uuid PRIMARY KEY,
  str_name    text NOT NULL UNIQUE,
  int_version bigint NOT NULL DEFAULT nextval('rota.limit_version')
);

CREATE TABLE rota.folder (
  pk_folder   uuid PRIMARY KEY,
  pk_show     uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  str_name    text NOT NULL,
  int_version bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  UNIQUE (pk_show, str_name)
);

-- The five tables with usage counters, from subscription to layer_resource. The fillfactor leaves room for new counts
-- in the same page (HOT updates), so that they write no index.
CREATE TABLE rota.subscription (
  pk_subscription uuid PRIMARY KEY,
  pk_show         uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  pk_alloc        uuid NOT NULL REFERENCES rota.alloc,
  int_size        bigint NOT NULL DEFAULT 0 CHECK (int_size >= 0),
  int_burst       bigint NOT NULL DEFAULT 0 CHECK (int_burst >= 0),
  int_gpu_burst   bigint NOT NULL DEFAULT -1 CHECK (int_gpu_burst >= -1),
  int_cores       bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus        bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version     bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  UNIQUE (pk_show, pk_alloc)
) WITH (fillfactor = 50);

COMMENT ON COLUMN rota.subscription.int_burst IS
  'Hard cap on cores; 0 refuses every core. A burst cannot be unlimited.';

COMMENT ON COLUMN rota.subscription.int_gpu_burst IS 'Hard cap on GPUs; 0 refuses every GPU, -1 is unlimited.';

CREATE TABLE rota.folder_resource (
  pk_folder     uuid PRIMARY KEY REFERENCES rota.folder ON DELETE CASCADE,
  pk_show       uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  int_min_cores bigint NOT NULL DEFAULT 0 CHECK (int_min_cores >= 0),
  int_max_cores bigint NOT NULL DEFAULT -1 CHECK (int_max_cores >= -1),
  int_min_gpus  bigint NOT NULL DEFAULT 0 CHECK (int_min_gpus >= 0),
  int_max_gpus  bigint NOT NULL DEFAULT -1 CHECK (int_max_gpus >= -1),
  int_cores     bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus      bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version   bigint NOT NULL DEFAULT nextval('rota.limit_version')
) WITH (fillfactor = 50);

COMMENT ON COLUMN rota.folder_resource.int_max_cores IS
  'Cap; 0 and -1 are unlimited. The same holds for int_max_gpus and for the caps of points, jobs and layers.';

CREATE TABLE rota.point (
  pk_show       uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  pk_dept       uuid NOT NULL REFERENCES rota.dept,
  int_min_cores bigint NOT NULL DEFAULT 0 CHECK (int_min_cores >= 0),
  int_max_cores bigint NOT NULL DEFAULT -1 CHECK (int_max_cores >= -1),
  int_min_gpus  bigint NOT NULL DEFAULT 0 CHECK (int_min_gpus >= 0),
  int_max_gpus  bigint NOT NULL DEFAULT -1 CHECK (int_max_gpus >= -1),
  int_cores     bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus      bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version   bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  PRIMARY KEY (pk_show, pk_dept)
) WITH (fillfactor = 50);

-- The engine owns jobs and layers: their ids are not checked here.
CREATE TABLE rota.job_resource (
  pk_job        uuid PRIMARY KEY,
  pk_show       uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  int_priority  integer NOT NULL DEFAULT 1,
  int_max_cores bigint NOT NULL DEFAULT -1 CHECK (int_max_cores >= -1),
  int_max_gpus  bigint NOT NULL DEFAULT -1 CHECK (int_max_gpus >= -1),
  int_cores     bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus      bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version   bigint NOT NULL DEFAULT nextval('rota.limit_version')
) WITH (fillfactor = 50);

CREATE TABLE rota.layer_resource (
  pk_layer      uuid PRIMARY KEY,
  pk_job        uuid NOT NULL,
  pk_show       uuid NOT NULL REFERENCES rota.show ON DELETE CASCADE,
  int_max_cores bigint NOT NULL DEFAULT -1 CHECK (int_max_cores >= -1),
  int_max_gpus  bigint NOT NULL DEFAULT -1 CHECK (int_max_gpus >= -1),
  int_cores     bigint NOT NULL DEFAULT 0 CHECK (int_cores >= 0),
  int_gpus      bigint NOT NULL DEFAULT 0 CHECK (int_gpus >= 0),
  int_version   bigint NOT NULL DEFAULT nextval('rota.limit_version')
) WITH (fillfactor = 50);

-- Bookings: one row per token, with all keys that it was charged to, so that a release credits the same keys even if a
-- host or job was moved meanwhile. No index besides the primary key and no foreign key: every frame would pay for them.
CREATE TABLE rota.proc (
  token              bigint PRIMARY KEY CHECK (token >= 0 AND token < 9007199254740992),
  pk_show            uuid NOT NULL,
  pk_alloc           uuid NOT NULL,
  pk_folder          uuid NOT NULL,
  pk_job             uuid NOT NULL,
  pk_layer           uuid NOT NULL,
  pk_dept            uuid NOT NULL,
  pk_host            uuid NOT NULL,
  int_cores_reserved bigint NOT NULL CHECK (int_cores_reserved >= 0),
  int_gpus_reserved  bigint NOT NULL CHECK (int_gpus_reserved >= 0),
  int_fence          bigint NOT NULL,
  ts_booked          timestamptz NOT NULL DEFAULT now()
);

-- Tombstones: tokens whose proc row was deleted or must never be inserted, so that a late duplicate cannot book them. A
-- tombstone covers a range of consecutive tokens. Tombstones of a show and fence never overlap, because a token gets
-- its tombstone in the transaction that deletes its row, or under the exclusive lock of the show: only the first
-- tombstone whose token_last is not below a token can cover it. No foreign key: every release would lock the row of its
-- show.
CREATE TABLE rota.proc_grave (
  pk_show     uuid NOT NULL,
  token_first bigint NOT NULL CHECK (token_first >= 0),
  token_last  bigint NOT NULL CHECK (token_last >= token_first),
  int_fence   bigint NOT NULL,
  ts_buried   timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (pk_show, int_fence, token_last)
);

COMMENT ON COLUMN rota.proc_grave.int_fence IS
  'Fence of the show when the tombstone was written; under a higher fence it has no effect and may be deleted.';

-- Frames with the same charge (group), and ranges of consecutive tokens (run); `owner` is the index of their group.
CREATE TYPE rota.ledger_group AS (
  pk_alloc uuid, pk_folder uuid, pk_job uuid, pk_layer uuid, pk_dept uuid, pk_host uuid,
  int_cores bigint, int_gpus bigint
);

CREATE TYPE rota.ledger_run AS (owner integer, first bigint, last bigint);

-- A token for which a call inserted no row, and the reason.
CREATE TYPE rota.ledger_barred AS (owner integer, token bigint, why text);

CREATE TYPE rota.ledger_key AS (level integer, id uuid, max_cores bigint, max_gpus bigint, cores bigint, gpus bigint);

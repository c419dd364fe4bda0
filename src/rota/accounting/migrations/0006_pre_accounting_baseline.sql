-- The books in PostgreSQL: limits, counters, and the procs they count. See docs/adr/0009-the-books.md.
-- Cores are hundredths of a core in every column; -1 in a cap means that there is none.

-- One counter for every row with limits, so that a version never comes back when a row is deleted and made again.
CREATE SEQUENCE rota.limit_version;

CREATE TABLE rota.show (
  pk_show             uuid PRIMARY KEY,
  str_name            text NOT NULL UNIQUE,
  b_scheduler_managed boolean NOT NULL DEFAULT false,
  int_fence           bigint NOT NULL DEFAULT 1 CHECK (int_fence > 0),
  int_founded         bigint NOT NULL DEFAULT 1 CHECK (int_founded <= int_fence),
  int_version         bigint NOT NULL DEFAULT nextval('rota.limit_version'),
  ts_created          timestamptz NOT NULL DEFAULT now(),
  -- How many jobs of a show may run at once. Shows without such a limit have no rows here and pay nothing.
  int_max_jobs integer NOT NULL DEFAULT -1 CHECK (int_max_jobs >= -1)
);

COMMENT ON COLUMN rota.show.b_scheduler_managed IS 'Whether Redis keeps the live books of this show.';

COMMENT ON COLUMN rota.show.int_fence IS 'Rises when what Redis believed about the show may no longer be used.';

COMMENT ON COLUMN rota.show.int_founded IS
  'Fence at which Redis last had to be seeded; one that was seeded under a lower fence may lack procs.';

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

-- The five tables that count. Half of each page is left free, so that a new count touches no index.
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

COMMENT ON COLUMN rota.subscription.int_burst IS 'Hard cap; 0 refuses every core. There is no unlimited burst.';

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
  'Cap; 0 and -1 are unlimited, here and in the caps of points, jobs and layers.';

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

-- Jobs and layers belong to the engine: their ids are taken as given.
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

-- What is booked. One row per token, with everything it was charged to, so that moving a host or a job in the meantime
-- gives back to the right keys. No index besides the key and no foreign key: both would be paid for by every frame.
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

-- Tokens that had their row or will never have one: whoever repeats their booking late finds them here. A grave holds a
-- run of consecutive tokens. Graves of a show and fence never overlap, since a token is buried by the transaction that deletes
-- its row, or under the exclusive lock: hence a token can only lie in the first grave that ends at it or behind it.
-- No foreign key: every release would write to the row of its show.
CREATE TABLE rota.proc_grave (
  pk_show     uuid NOT NULL,
  token_first bigint NOT NULL CHECK (token_first >= 0),
  token_last  bigint NOT NULL CHECK (token_last >= token_first),
  int_fence   bigint NOT NULL,
  ts_buried   timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (pk_show, int_fence, token_last)
);

COMMENT ON COLUMN rota.proc_grave.int_fence IS 'Fence of the show at burial; under a higher one the grave bars nobody, and may go.';

-- Frames that ask the same of the same keys, and the consecutive tokens (runs) they own.
CREATE TYPE rota.ledger_group AS (
  pk_alloc uuid, pk_folder uuid, pk_job uuid, pk_layer uuid, pk_dept uuid, pk_host uuid,
  int_cores bigint, int_gpus bigint
);

CREATE TYPE rota.ledger_run AS (owner integer, first bigint, last bigint);

-- A token that got no row from a call, and why.
CREATE TYPE rota.ledger_barred AS (owner integer, token bigint, why text);

CREATE TYPE rota.ledger_key AS (level integer, id uuid, max_cores bigint, max_gpus bigint, cores bigint, gpus bigint);

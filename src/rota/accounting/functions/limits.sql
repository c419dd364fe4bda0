-- A change of limits gets a higher version than everything published before.
CREATE OR REPLACE FUNCTION rota.limits_changed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  NEW.int_version := nextval('rota.limit_version');
  RETURN NEW;
END $$;

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF str_name, b_scheduler_managed, int_fence ON rota.show
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF str_name ON rota.alloc
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF str_name ON rota.dept
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF str_name ON rota.folder
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF int_size, int_burst, int_gpu_burst ON rota.subscription
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF int_min_cores, int_max_cores, int_min_gpus, int_max_gpus
  ON rota.folder_resource FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF int_min_cores, int_max_cores, int_min_gpus, int_max_gpus
  ON rota.point FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF int_priority, int_max_cores, int_max_gpus ON rota.job_resource
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE TRIGGER versioned BEFORE UPDATE OF int_max_cores, int_max_gpus ON rota.layer_resource
  FOR EACH ROW EXECUTE FUNCTION rota.limits_changed();

CREATE OR REPLACE FUNCTION rota.limits_lowered() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM rota.show_raise_fence(OLD.pk_show);
  RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION rota.cap_lowered(before bigint, after bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$ SELECT after > 0 AND (before <= 0 OR after < before) $$;

CREATE OR REPLACE TRIGGER lowered AFTER UPDATE OF int_burst, int_gpu_burst ON rota.subscription FOR EACH ROW
  WHEN (NEW.int_burst < OLD.int_burst
        OR NEW.int_gpu_burst >= 0 AND (OLD.int_gpu_burst < 0 OR NEW.int_gpu_burst < OLD.int_gpu_burst))
  EXECUTE FUNCTION rota.limits_lowered();

CREATE OR REPLACE TRIGGER lowered AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.folder_resource FOR EACH ROW
  WHEN (rota.cap_lowered(OLD.int_max_cores, NEW.int_max_cores) OR rota.cap_lowered(OLD.int_max_gpus, NEW.int_max_gpus))
  EXECUTE FUNCTION rota.limits_lowered();

CREATE OR REPLACE TRIGGER lowered AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.point FOR EACH ROW
  WHEN (rota.cap_lowered(OLD.int_max_cores, NEW.int_max_cores) OR rota.cap_lowered(OLD.int_max_gpus, NEW.int_max_gpus))
  EXECUTE FUNCTION rota.limits_lowered();

CREATE OR REPLACE TRIGGER lowered AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.job_resource FOR EACH ROW
  WHEN (rota.cap_lowered(OLD.int_max_cores, NEW.int_max_cores) OR rota.cap_lowered(OLD.int_max_gpus, NEW.int_max_gpus))
  EXECUTE FUNCTION rota.limits_lowered();

CREATE OR REPLACE TRIGGER lowered AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.layer_resource FOR EACH ROW
  WHEN (rota.cap_lowered(OLD.int_max_cores, NEW.int_max_cores) OR rota.cap_lowered(OLD.int_max_gpus, NEW.int_max_gpus))
  EXECUTE FUNCTION rota.limits_lowered();

-- Bookings made in Redis against a removed share must not be inserted either.
CREATE OR REPLACE TRIGGER removed AFTER DELETE ON rota.subscription FOR EACH ROW EXECUTE FUNCTION rota.limits_lowered();

CREATE OR REPLACE TRIGGER removed AFTER DELETE ON rota.folder_resource FOR EACH ROW EXECUTE FUNCTION rota.limits_lowered();

CREATE OR REPLACE TRIGGER removed AFTER DELETE ON rota.point FOR EACH ROW EXECUTE FUNCTION rota.limits_lowered();

-- Notifies dispatchers to retry bookings that a limit had refused.
CREATE OR REPLACE FUNCTION rota.limits_told() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_notify('rota_limits', NEW.pk_show::text);
  RETURN NULL;
END $$;

CREATE OR REPLACE TRIGGER told AFTER INSERT OR UPDATE OF int_size, int_burst, int_gpu_burst ON rota.subscription
  FOR EACH ROW EXECUTE FUNCTION rota.limits_told();

CREATE OR REPLACE TRIGGER told AFTER INSERT OR UPDATE OF int_max_cores, int_max_gpus ON rota.folder_resource
  FOR EACH ROW EXECUTE FUNCTION rota.limits_told();

CREATE OR REPLACE TRIGGER told AFTER INSERT OR UPDATE OF int_max_cores, int_max_gpus ON rota.point
  FOR EACH ROW EXECUTE FUNCTION rota.limits_told();

CREATE OR REPLACE TRIGGER told AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.job_resource
  FOR EACH ROW EXECUTE FUNCTION rota.limits_told();

CREATE OR REPLACE TRIGGER told AFTER UPDATE OF int_max_cores, int_max_gpus ON rota.layer_resource
  FOR EACH ROW EXECUTE FUNCTION rota.limits_told();

-- Remove all procs and graves, and what is left of them.
TRUNCATE rota.proc, rota.proc_grave

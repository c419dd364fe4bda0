"""`rota top`: a live view of shows, pools, workers and jobs. `data` polls PostgreSQL, `view` renders the snapshots."""

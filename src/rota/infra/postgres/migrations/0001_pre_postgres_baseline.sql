COMMENT ON SCHEMA rota IS
  'The schema of Rota. Change it only with "rota db migrate"; rota.migration lists the applied migrations.';

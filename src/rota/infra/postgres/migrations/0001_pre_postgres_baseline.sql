COMMENT ON SCHEMA rota IS
  'Everything Rota keeps. Change it only with "rota db migrate"; rota.migration lists what was applied.';

-- script: finish
-- use scores
-- key waiting  zset  waiting|waiting:{group}
-- key working  zset  working|working:{group}
-- key runs     hash  working-runs|working-runs:{group}   name -> run, owner, due (us), acquired (us)
-- arg over     packed  {name, run, due (us), whether to add it}
-- reply finished moved:int added:int stale:int
--   The runs have ended in PostgreSQL: each agent waits until `due`, or is removed if that is 0. Run 0: an entry without
--   a stamp. A stamp of another run is left unchanged. `add`: also add an agent that is in neither set.

local moved, added, stale = 0, 0, 0
for _, each in ipairs(over) do
  local name, run, due, add = each[1], each[2], each[3], each[4]
  local stamp = read_stamp(redis.call('HGET', runs, name))
  local in_working = redis.call('ZSCORE', working, name)
  if stamp and stamp ~= run then
    stale = stale + 1
  elseif stamp or (run == 0 and in_working) then
    redis.call('HDEL', runs, name)
    redis.call('ZREM', working, name)
    if due > 0 and not redis.call('ZSCORE', waiting, name) then wait(name, due) end
    moved = moved + 1
  elseif add and due > 0 and not in_working and not redis.call('ZSCORE', waiting, name) then
    wait(name, due)
    added = added + 1
  else
    stale = stale + 1
  end
end
return {'finished', moved, added, stale}

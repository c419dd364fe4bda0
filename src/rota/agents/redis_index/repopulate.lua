-- script: repopulate
-- use scores
-- key waiting  zset  waiting|waiting:{group}
-- key working  zset  working|working:{group}
-- arg idle     packed  {name, due (us)} of agents without a run in PostgreSQL
-- reply repopulated added:int lowered:int
--   Never raises a score: a score that is too early is corrected when its run is refused, while raising one could
--   overwrite a concurrent change to an earlier time.

local added, lowered = 0, 0
for _, each in ipairs(idle) do
  local name, due = each[1], each[2]
  local found = redis.call('ZSCORE', waiting, name)
  if found then
    if micros(found) - micros(found) % 1000 > due then
      redis.call('ZREM', waiting, name)
      wait(name, due)
      lowered = lowered + 1
    end
  elseif not redis.call('ZSCORE', working, name) then
    wait(name, due)
    added = added + 1
  end
end
return {'repopulated', added, lowered}

-- script: acquire
-- use scores
-- key waiting  zset  waiting|waiting:{group}
-- key working  zset  working|working:{group}
-- key runs     hash  working-runs|working-runs:{group}   name -> run, owner, due (us), acquired (us)
-- arg owner    int   fence of the member's lease
-- arg asked    packed  {name, due (us) as it was seen, run, timeout (ms)}
-- reply acquired now_ms:int places:packed   which of the asked are ours, from 1
--   Acquires agents that are due by this clock and still have the score that was read: one that ran in between has
--   another score. A retry after a lost reply, with the same runs, returns the same agents.

local now = now_us()
local now_ms = math.floor(now / 1000)
local until_now = due_until(now)
local places = {}
for place, each in ipairs(asked) do
  local name, seen, run, timeout_ms = each[1], each[2], each[3], each[4]
  local found = redis.call('ZSCORE', waiting, name)
  if found then
    if redis.call('ZSCORE', working, name) then
      -- An agent is in at most one set: it returns to `waiting` when its run ends.
      redis.call('ZREM', waiting, name)
    elseif micros(found) == seen and seen <= until_now then
      redis.call('ZREM', waiting, name)
      redis.call('ZADD', working, score((now_ms + timeout_ms) * 1000), name)
      redis.call('HSET', runs, name, table.concat({whole(run), whole(owner), whole(seen), whole(now)}, ' '))
      places[#places + 1] = place
    end
  elseif read_stamp(redis.call('HGET', runs, name)) == run then
    places[#places + 1] = place
  end
end
return {'acquired', now_ms, cmsgpack.pack(places)}

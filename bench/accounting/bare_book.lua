-- script: bare_book
-- key seq      string  acct:seq
-- key places*  hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}
-- arg frames   packed  one frame after the other: sub, folder, job, layer, point (places), cores, gpus
-- reply booked frames:int
-- reply refused frames:int level:int current:int cap:int
--   What `bench accounting` compares with: each frame is checked at all five levels and then added there, in whole
--   cores and without a token, so a call that is repeated counts twice. A frame that is refused ends the batch.

local CORES_CAP = {'burst', 'int_max_cores', 'int_max_cores', 'int_max_cores', 'int_max_cores'}
local GPUS_CAP = {'gpu_burst', 'int_max_gpus', 'int_max_gpus', 'int_max_gpus', 'int_max_gpus'}

local booked = 0
for at = 1, #frames, 7 do
  local cores, gpus = frames[at + 5], frames[at + 6]
  for level = 1, 5 do
    local place = places[frames[at + level - 1]]
    local held = redis.call('HMGET', place, 'int_cores', 'int_gpus', CORES_CAP[level], GPUS_CAP[level])
    local used, cap = tonumber(held[1] or 0), tonumber(held[3] or -1)
    if cap > 0 and used + cores > cap then return {'refused', booked, level, used, cap} end
    used, cap = tonumber(held[2] or 0), tonumber(held[4] or -1)
    if cap > 0 and used + gpus > cap then return {'refused', booked, level, used, cap} end
  end
  for level = 1, 5 do
    local place = places[frames[at + level - 1]]
    redis.call('HINCRBY', place, 'int_cores', cores)
    redis.call('HINCRBY', place, 'int_gpus', gpus)
  end
  redis.call('INCR', seq)
  booked = booked + 1
end
return {'booked', booked}

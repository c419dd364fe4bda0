-- script: overlap
-- key waiting  zset  waiting|waiting:{group}
-- key working  zset  working|working:{group}
-- arg limit    int   size of the random sample of `waiting`
-- reply sampled count:int overlaps:int   overlaps: also in `working`; expected 0

local sample = redis.call('ZRANDMEMBER', waiting, limit)
local overlaps = 0
for _, each in ipairs(sample) do
  if redis.call('ZSCORE', working, each) then overlaps = overlaps + 1 end
end
return {'sampled', #sample, overlaps}

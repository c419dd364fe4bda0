-- script: overlap
-- key waiting  zset  waiting|waiting:{group}
-- key working  zset  working|working:{group}
-- arg limit    int   how many of those that wait are looked at, by chance
-- reply sampled count:int overlaps:int   of these so many also run: there should be none

local sample = redis.call('ZRANDMEMBER', waiting, limit)
local overlaps = 0
for _, each in ipairs(sample) do
  if redis.call('ZSCORE', working, each) then overlaps = overlaps + 1 end
end
return {'sampled', #sample, overlaps}

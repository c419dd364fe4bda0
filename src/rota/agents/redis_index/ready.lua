-- script: ready
-- use scores
-- key waiting  zset  waiting|waiting:{group}
-- arg since    int   lowest due time to return (us)
-- arg offset   int   entries to skip
-- arg limit    int   at most 200
-- reply ready now_us:int names:bytes* dues_us:int* count:int next_us:int   next_us 0: no agent waits for later

local now = now_us()
local until_now = score(due_until(now))
local first = since > 0 and score(since) or '-inf'
local found = redis.call('ZRANGEBYSCORE', waiting, first, until_now, 'WITHSCORES', 'LIMIT', offset, limit)
local names, dues = {}, {}
for at = 1, #found, 2 do
  names[#names + 1] = found[at]
  dues[#dues + 1] = micros(found[at + 1])
end
local later = redis.call('ZRANGEBYSCORE', waiting, '(' .. until_now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
return {
  'ready',
  now,
  names,
  dues,
  redis.call('ZCOUNT', waiting, '-inf', until_now),
  later[2] and micros(later[2]) or 0,
}

-- script: request_tokens
-- key bucket   hash   rota:http:tokens:{key}   left: tokens in the bucket; at: the time of that count (ms)
-- arg rate     float  tokens per second
-- arg burst    float  size of the bucket
-- arg want     int    tokens to lease, at most
-- reply leased tokens:int wait_ms:int
--   The tokens leave the bucket for good. With none: the time until there is one.
--   An absent bucket is full. A clock that steps back refills nothing, and the count goes on from its new time.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stored = redis.call('HMGET', bucket, 'left', 'at')
local left, at = tonumber(stored[1] or burst), tonumber(stored[2] or now)
left = math.min(burst, left + math.max(0, now - at) * rate / 1000)

local tokens = math.min(want, math.floor(left))
left = left - tokens
redis.call('HSET', bucket, 'left', left, 'at', now)
redis.call('PEXPIRE', bucket, math.ceil((burst - left) * 1000 / rate) + 1000)

local wait_ms = 0
if tokens == 0 then
  wait_ms = math.ceil((1 - left) * 1000 / rate)
end
return {'leased', tokens, wait_ms}

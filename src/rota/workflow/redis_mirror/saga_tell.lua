-- script: saga_tell
-- key stack    list    saga:{saga}:stack   JSON, the next compensation first
-- key lock     string  saga:{saga}:lock    fence of the saga while it rolls back
-- arg fence    int     of the saga when it was read
-- arg lock_ms  int     TTL of the lock; 0: the saga does not roll back
-- arg entries  packed  the new contents of the stack
-- reply told | stale                       stale: the stack has a newer fence

local first = redis.call('LINDEX', stack, 0)
if first then
  local is_json, entry = pcall(cjson.decode, first)
  if is_json and type(entry) == 'table' and (tonumber(entry.fence) or 0) > fence then return {'stale'} end
end
redis.call('DEL', stack)
if #entries > 0 then redis.call('RPUSH', stack, unpack(entries)) end
if lock_ms > 0 then
  redis.call('SET', lock, fence, 'PX', lock_ms)
else
  redis.call('DEL', lock)
end
return {'told'}

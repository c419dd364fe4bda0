-- script: forget
-- key waiting     zset  waiting|waiting:{group}
-- key working     zset  working|working:{group}
-- key runs        hash  working-runs|working-runs:{group}
-- arg everywhere  bool  also from `working`; else running agents are unchanged
-- arg name*       bytes
-- reply forgotten count:int

local count = 0
for _, each in ipairs(name) do
  local found = redis.call('ZREM', waiting, each)
  if everywhere then
    found = math.max(found, redis.call('ZREM', working, each))
    redis.call('HDEL', runs, each)
  end
  count = count + found
end
return {'forgotten', count}

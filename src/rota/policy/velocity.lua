-- script: velocity
-- key windows*  zset  rota:velocity:{limit}   job -> admission time (ms)
-- arg asked     packed  {{{window, most, within (ms)}, ...}, {job, ...}} for each check; a window by its number
-- reply counted over:int*
--   For each job of each check, in order: 0 when every limit admits it, and then it holds a slot in each window;
--   else the number, from 1, of the first limit that it exceeds, and then it takes no slot at all.
--   A job keeps its slot until the window has passed, so the script is idempotent.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local sizes, over = {}, {}

local function size(limit)
  local window = limit[1]
  if not sizes[window] then
    redis.call('ZREMRANGEBYSCORE', windows[window], '-inf', now - limit[3])
    sizes[window] = redis.call('ZCARD', windows[window])
  end
  return sizes[window]
end

for _, question in ipairs(asked) do
  local limits, jobs = question[1], question[2]
  for _, job in ipairs(jobs) do
    local full, wanted = 0, {}
    for at, limit in ipairs(limits) do
      local taken = size(limit)
      if not redis.call('ZSCORE', windows[limit[1]], job) then
        if taken >= limit[2] then full = at break end
        wanted[#wanted + 1] = limit
      end
    end
    if full == 0 then
      for _, limit in ipairs(wanted) do
        redis.call('ZADD', windows[limit[1]], now, job)
        redis.call('PEXPIRE', windows[limit[1]], limit[3])
        sizes[limit[1]] = sizes[limit[1]] + 1
      end
    end
    over[#over + 1] = full
  end
end
return {'counted', over}

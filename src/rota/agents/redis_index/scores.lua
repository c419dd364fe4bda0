-- Shared by the agent scripts: scores, stamps, the server's clock.
-- A score is microseconds / 10^6. A due time has whole milliseconds; the last three digits order equal due times.

local function whole(number)
  return string.format('%.0f', number)
end

local function micros(score)
  return math.floor(tonumber(score) * 1000000 + 0.5)
end

local function score(us)
  return string.format('%.6f', us / 1000000)
end

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The last microsecond of the current millisecond: the upper bound of due scores.
local function due_until(us)
  return us - us % 1000 + 999
end

-- Adds `name` after agents that are due in the same millisecond.
local function wait(name, due_us)
  local first = due_us - due_us % 1000
  local last = redis.call('ZREVRANGEBYSCORE', waiting, score(first + 999), score(first), 'WITHSCORES', 'LIMIT', 0, 1)
  local place = last[2] and math.min(micros(last[2]) + 1, first + 999) or first
  redis.call('ZADD', waiting, score(place), name)
end

-- The run, owner, due time and start (us) of a stamp; nil if it is missing or malformed.
local function read_stamp(text)
  if not text then return nil end
  local run, owner, due, began = string.match(text, '^(%d+) (%d+) (%d+) (%d+)$')
  return tonumber(run), tonumber(owner), tonumber(due), tonumber(began)
end

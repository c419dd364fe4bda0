-- script: step
-- key counter     string  rota:cb:{name}:failures   failure count for operators; never read here
-- key record      hash    rota:cb:{name}:state      the fields of BreakerState in model/circuit_breaker.py
-- arg event       str     allow, success, failure, cancel or peek
-- arg generation  int     of the reported permit; 0 otherwise
-- arg at_ms       int     time of the event; 0: now, on this server's clock
-- arg limit       int     failures that open the breaker
-- arg window_ms   int     counting window; 0: consecutive failures
-- arg open_ms     int
-- arg probes_max  int     0: half-open is by duration
-- arg enough      int     successes that close the breaker
-- arg probe_ms    int     by count: time after which a probe is lost; by duration: length of half-open
-- reply granted was:str phase:str failures:int generation:int
-- reply refused was:str phase:str failures:int retry_ms:int
-- reply noted was:str phase:str failures:int retry_ms:int

-- Mirrors model/circuit_breaker.py function by function: change both (tests/property/test_breaker.py compares them).

-- State that is unchanged for a day expires, so that unused names leave nothing behind.
local FORGET_MS = 86400000

local now = at_ms
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local PHASES = {closed = true, open = true, half_open = true}
local NUMBERS = {'generation', 'failures', 'until_ms', 'probes', 'successes'}

local function new(phase, generation, failures)
  return {
    phase = phase,
    generation = generation,
    failures = failures,
    failed_at_ms = '',
    until_ms = 0,
    probes = 0,
    successes = 0,
  }
end

-- An unreadable record (edited by hand) counts as empty: a breaker must not fail the calls it guards.
local function read()
  local held = redis.call('HMGET', record, 'phase', 'failed_at_ms', unpack(NUMBERS))
  local found = {phase = held[1], failed_at_ms = held[2] or ''}
  for place, name in ipairs(NUMBERS) do
    local digits = string.match(held[place + 2] or '0', '^%d+$')
    if not digits or #digits > 15 then return new('closed', 0, 0) end
    found[name] = tonumber(digits)
  end
  return PHASES[found.phase] and found or new('closed', 0, 0)
end

local state = read()
local was = state.phase
local changed = false

local function wait()
  if state.phase == 'closed' then return 0 end
  return math.max(0, state.until_ms - now)
end

local function save()
  local forget_ms = wait() + FORGET_MS
  redis.call('HSET', record, 'phase', state.phase, 'generation', state.generation, 'failures', state.failures,
    'failed_at_ms', state.failed_at_ms, 'until_ms', state.until_ms, 'probes', state.probes, 'successes',
    state.successes)
  redis.call('PEXPIRE', record, forget_ms)
  if state.failures == 0 then
    redis.call('DEL', counter)
  else
    local closed_window = state.phase == 'closed' and window_ms > 0
    redis.call('SET', counter, state.failures, 'PX', closed_window and window_ms or forget_ms)
  end
end

local function span()
  if state.phase == 'open' then return open_ms end
  if state.phase == 'half_open' then return probe_ms end
  return 0
end

local function enter(phase, failures)
  state = new(phase, math.max(state.generation + 1, now), failures)
  if phase ~= 'closed' then state.until_ms = now + span() end
  changed = true
end

local function settle()
  if state.until_ms > now + span() then
    state.until_ms = now + span()
    changed = true
  elseif state.phase == 'half_open' and probes_max == 0 and now >= state.until_ms then
    enter('closed', 0)
  end
end

local function probe()
  if state.phase == 'open' then
    if now < state.until_ms then return false end
    enter('half_open', state.failures)
  end
  if probes_max == 0 then return true end
  if state.probes >= probes_max and now >= state.until_ms then
    enter('half_open', state.failures)
  end
  if state.probes >= probes_max then return false end
  state.probes = state.probes + 1
  state.until_ms = now + probe_ms
  changed = true
  return true
end

local function count()
  local failures, recent = state.failures + 1, {}
  if window_ms > 0 then
    for at in string.gmatch(state.failed_at_ms, '%d+') do
      at = tonumber(at)
      if now - window_ms < at and at <= now then recent[#recent + 1] = string.format('%d', at) end
    end
    recent[#recent + 1] = string.format('%d', now)
    failures = #recent
  end
  if failures >= limit then
    enter('open', failures)
  else
    state.failures, state.failed_at_ms, changed = failures, table.concat(recent, ','), true
  end
end

local function report()
  if state.phase == 'closed' then
    if event == 'failure' then
      count()
    elseif event == 'success' and window_ms == 0 and state.failures > 0 then
      state.failures, changed = 0, true
    end
  elseif state.phase == 'half_open' then
    if event == 'failure' then
      enter('open', state.failures + 1)
    elseif event == 'success' and probes_max > 0 then
      state.successes, changed = state.successes + 1, true
      if state.successes >= enough then enter('closed', 0) end
    elseif event == 'cancel' and probes_max > 0 then
      state.probes, changed = math.max(0, state.probes - 1), true
    end
  end
end

local answer
settle()
if event == 'allow' then
  if state.phase == 'closed' or probe() then
    answer = {'granted', was, state.phase, state.failures, state.generation}
  else
    answer = {'refused', was, state.phase, state.failures, wait()}
  end
else
  if event ~= 'peek' and generation == state.generation then report() end
  answer = {'noted', was, state.phase, state.failures, wait()}
end
if changed then save() end
return answer

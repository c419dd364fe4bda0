-- Shared by the scripts of the live ledger: units, damage, and the five hashes of a booking.
-- Cores are hundredths in the scripts and decimal text in cores in the hashes; GPUs are whole numbers in both.

-- Tokens of one bucket; SPAN in script_args.py.
local SPAN = 128
-- The position of a reconciliation's marker when every possible bucket is in the shadow.
local ENDED = 0
-- Whole numbers below this are exact in Lua.
local EXACT = 9007199254740992
local LEVELS = {'sub', 'folder', 'job', 'layer', 'point'}

-- A whole number as text; Lua would write 1e+15 for large ones.
local function whole(number)
  return string.format('%.0f', number)
end

local function hundredths(text)
  local number = tonumber(text)
  if not number or number ~= number or number > 9e13 or number < -9e13 then return nil end
  local rounded = math.floor(number * 100 + 0.5)
  if math.abs(number * 100 - rounded) > 0.001 then return nil end
  return rounded
end

local function pieces(text)
  local number = tonumber(text)
  return number and number % 1 == 0 and math.abs(number) <= EXACT and number or nil
end

-- A count or a fence; anything else counts as missing.
local function natural(text)
  return text and string.find(text, '^%d+$') and pieces(text) or nil
end

local function in_cores(number)
  if number % 100 == 0 then return whole(number / 100) end
  return (string.gsub(string.format('%.2f', number / 100), '0$', ''))
end

-- The id of this run of this server: a Redis that restarts with an older state has another one.
local function run_id()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

-- The show in Redis. `fence` is nil unless the show was seeded on this run of the server.
local function read_show()
  local held = redis.pcall('HMGET', show, 'fence', 'run', 'seeding', 'recount', 'charges', 'limits', 'recounter')
  if held.err then
    redis.call('DEL', show)
    held = {false, false, false, false, false, false, false}
  end
  local here = held[2] and held[2] == run_id()
  return {
    fence = here and natural(held[1]) or nil,
    seeding = here and natural(held[3]) or nil,
    recount = pieces(held[4] or nil),
    charges = natural(held[5]),
    limits = natural(held[6]) or 0,
    recounter = held[7] or '',
  }
end

-- A key holds something that no script writes. The show is refused until it is seeded again, which repairs everything.
local function damaged(where)
  redis.call('HDEL', show, 'fence', 'seeding')
  return {'damaged', where}
end

-- One of the five hashes: counters, caps (nil for no limit), and whether its limits were ever written. Jobs and layers
-- are counted only then: without a cap nothing could refuse, and their usage follows from the charges. Limits are never
-- written without counters, nor one of them alone: a hash that lacks any of them is damaged, as is one with a negative
-- counter.
local function standing(key, level)
  local held
  if level == 1 then
    held = redis.pcall('HMGET', key, 'int_cores', 'int_gpus', 'burst', 'gpu_burst')
  elseif level == 2 then
    held = redis.pcall('HMGET', key, 'int_cores', 'int_gpus', 'int_max_cores', 'int_max_gpus', 'show_id')
  else
    held = redis.pcall('HMGET', key, 'int_cores', 'int_gpus', 'int_max_cores', 'int_max_gpus')
  end
  if held.err then return nil end
  local cores = hundredths(held[1] or '0')
  local gpus = pieces(held[2] or '0')
  if not cores or not gpus or cores < 0 or gpus < 0 then return nil end
  local limited = held[3] and true or false
  local cap, gpu_cap
  if limited then
    cap, gpu_cap = hundredths(held[3]), held[4] and pieces(held[4])
    if not cap or not gpu_cap or not held[1] or not held[2] then return nil end
  end
  local known = limited
  if level == 1 then
    if gpu_cap and gpu_cap < 0 then gpu_cap = nil end
  else
    if cap and cap <= 0 then cap = nil end
    if gpu_cap and gpu_cap <= 0 then gpu_cap = nil end
    if level == 2 then known = limited and held[5] == show_id end
  end
  return {
    key = key,
    known = known,
    limited = limited,
    counted = limited or (level ~= 3 and level ~= 4),
    used = {cores, gpus},
    caps = {cap or nil, gpu_cap or nil},
  }
end

-- A hash without usage and limits is deleted.
local function write_standing(held)
  local used = held.used
  if used[1] == 0 and used[2] == 0 and not held.limited then
    redis.call('DEL', held.key)
  else
    redis.call('HSET', held.key, 'int_cores', in_cores(used[1]), 'int_gpus', whole(used[2]))
  end
end

-- A charge is text of fixed widths: five ids of 36 characters, a blank between, then cores and GPUs.
local function name_in(charge, level)
  return LEVELS[level] .. ':' .. string.sub(charge, 37 * level - 36, 37 * level - 1)
end

-- The charge of a token by its position in the group: in a single-frame batch each token has its own middle.
local function charge_in(group, nth)
  return group[11] and group[8] .. group[11][nth] .. group[12] or group[8]
end

-- Hundredths of a core and GPUs of one token of a charge; nil if the text is not a charge.
local function amounts_in(charge)
  local _, _, cores, gpus = string.find(charge, '^(%d+) (%d+)$', 186)
  return tonumber(cores), tonumber(gpus)
end

-- A value of `acct:charges`: token count, fence of the booking, charge.
local function read_charge(text)
  local tokens, fence, charge = string.match(text, '^(%d+) (%d+) (.+)$')
  return tonumber(tokens), tonumber(fence), charge
end

-- The tokens of all groups by bucket, as fields of its hash, and per group their positions there: bucket, first, last,
-- and so on. Lengths are counted by hand, because `#` on a table costs more than anything else here. Differences of
-- tokens are taken first: a sum with the last tokens would exceed the exact range of numbers.
local function spread(groups, numbers)
  local at_of, fields, counts, parts = {}, {}, {}, {}
  for at, number in ipairs(numbers) do
    at_of[number], fields[at], counts[at] = at, {}, 0
  end
  for place, group in ipairs(groups) do
    local runs, own, length = group[10], {}, 0
    for nth = 1, #runs, 2 do
      local token, last = runs[nth], runs[nth + 1]
      while token <= last do
        local number = math.floor(token / SPAN)
        local base, at = number * SPAN, at_of[number]
        local wanted, count = fields[at], counts[at]
        local stop = math.min(last, base + SPAN - 1)
        own[length + 1], own[length + 2], own[length + 3] = at, count + 1, count + 1 + (stop - token)
        length = length + 3
        for within = token - base, stop - base do
          count = count + 1
          wanted[count] = within
        end
        counts[at] = count
        token = stop + 1
      end
    end
    parts[place] = own
  end
  return fields, parts
end

-- Whether the index of limits is complete: the show stores its size.
local function is_whole(held)
  return redis.pcall('HLEN', index) == held.limits
end

-- Those of the names that have limits in Redis; nil if the index cannot be read.
local function limited_among(names)
  local limited = {}
  for from = 1, #names, 4000 do
    local till = math.min(from + 3999, #names)
    local found = redis.pcall('HMGET', index, unpack(names, from, till))
    if found.err then return nil end
    for nth = from, till do
      if found[nth - from + 1] then limited[names[nth]] = true end
    end
  end
  return limited
end

-- Whether any job or layer of the show has limits; true without a look if the index is too large to scan cheaply.
local function has_own_limits()
  local length = redis.pcall('HLEN', index)
  if type(length) ~= 'number' or length > 64 then return true end
  for _, name in ipairs(redis.call('HKEYS', index)) do
    if string.find(name, '^job:') or string.find(name, '^layer:') then return true end
  end
  return false
end

-- Jobs and layers sent without a place that have limits nevertheless; nil if the index cannot be read.
local function limited_of(groups, held)
  local names, count, asks = {}, 0, nil
  for _, group in ipairs(groups) do
    if group[11] and asks == nil then asks = has_own_limits() end
    if not group[11] or asks then
      for nth = 1, group[11] and #group[11] or 1 do
        local charge = charge_in(group, nth)
        for level = 3, 4 do
          if group[level] == 0 then
            count = count + 1
            names[count] = name_in(charge, level)
          end
        end
      end
    end
  end
  -- During a seeding the index is incomplete.
  if (count > 0 or asks ~= nil) and held.fence and not is_whole(held) then return nil end
  return limited_among(names)
end

local function is_a(kind, key)
  local found = redis.call('TYPE', key).ok
  return found == kind or found == 'none'
end

local function add_to_shadow(field, sum)
  return sum == 0 or type(redis.pcall('HINCRBY', shadow, field, whole(sum))) == 'number'
end

-- Adds {charge, tokens} to the shadow of the reconciliation in progress, which ends here if it fails. Jobs and layers
-- are added if they have limits; those that get limits later are left to the next reconciliation (`uncounted`).
local function cast_shadow(cast_by)
  local cores_of, gpus_of, own, count = {}, {}, {}, 0
  for _, each in ipairs(cast_by) do
    local charge, tokens = each[1], each[2]
    local cores, gpus = amounts_in(charge)
    for level = 1, 5 do
      local name = name_in(charge, level)
      if not cores_of[name] then
        cores_of[name], gpus_of[name] = 0, 0
        if level == 3 or level == 4 then
          count = count + 1
          own[count] = name
        end
      end
      cores_of[name] = cores_of[name] + cores * tokens
      gpus_of[name] = gpus_of[name] + gpus * tokens
    end
  end
  local limited = limited_among(own) or {}
  for _, name in ipairs(own) do
    if not limited[name] then cores_of[name] = nil end
  end
  for name, cores in pairs(cores_of) do
    if not (add_to_shadow(name .. ':cores', cores) and add_to_shadow(name .. ':gpus', gpus_of[name])) then
      redis.call('HDEL', show, 'recount')
      return false
    end
  end
  return true
end

-- Incremented by every change. Nothing depends on its value, so a value that is not a number restarts.
local function next_seq()
  local moved = redis.pcall('INCR', seq)
  if type(moved) == 'number' then return moved end
  redis.call('DEL', seq)
  return redis.call('INCR', seq)
end

local function last_seq()
  local found = redis.pcall('GET', seq)
  return type(found) == 'string' and tonumber(found) or 0
end

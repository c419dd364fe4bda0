-- What the scripts of the live ledger share: units, damage, and the five hashes of a booking.
-- Cores are hundredths in here and decimal text in cores in the hashes; GPUs are whole numbers in both.

-- Tokens of one bucket; SPAN in wire.py.
local SPAN = 128
local BEGUN, ENDED = -1, 9007199254740992
local LEVELS = {'sub', 'folder', 'job', 'layer', 'point'}

-- A whole number as text; Lua would write 1e+15 for large ones.
local function whole(number)
  return string.format('%.0f', number)
end

local function hundredths(text)
  local number = tonumber(text)
  if not number or number ~= number or number > 9e13 or number < -9e13 then return nil end
  return math.floor(number * 100 + 0.5)
end

local function in_cores(number)
  if number % 100 == 0 then return whole(number / 100) end
  return (string.gsub(string.format('%.2f', number / 100), '0$', ''))
end

-- Which run of which server this is: a Redis that comes back with an older state of itself has another one.
local function run_id()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

-- The show as Redis knows it. `fence` is nil unless the show was seeded on this very run of the server.
local function read_show()
  local held = redis.pcall('HMGET', show, 'fence', 'run', 'seeding', 'recount', 'charges')
  if held.err then
    redis.call('DEL', show)
    held = {false, false, false, false, false}
  end
  local here = held[2] and held[2] == run_id()
  return {
    fence = here and tonumber(held[1] or nil) or nil,
    seeding = here and tonumber(held[3] or nil) or nil,
    recount = tonumber(held[4] or nil),
    charges = tonumber(held[5] or nil) or 0,
  }
end

-- Somebody wrote here what no script writes. The show is refused until it is seeded anew, which mends everything.
local function damaged(where)
  redis.call('HDEL', show, 'fence', 'seeding')
  return {'damaged', where}
end

-- One of the five hashes: counters, caps (nil where there is none), and whether its limits were ever written. Jobs and
-- layers are counted only then: without a cap nothing could refuse, and their frames are told from the charges.
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
  local gpus = tonumber(held[2] or '0')
  local cap = held[3] and hundredths(held[3])
  local gpu_cap = held[4] and tonumber(held[4])
  if not cores or not gpus or (held[3] and not cap) or (held[4] and not gpu_cap) then return nil end
  local limited = held[3] and true or false
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

-- What holds nothing and has no limits needs no hash.
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

-- A charge in `acct:charges` is how many tokens hold it, a blank, and what it is.
local function read_charge(text)
  local tokens, charge = string.match(text, '^(%d+) (.+)$')
  return tonumber(tokens), charge
end

-- The tokens of all groups by bucket, as fields of its hash, and for each group where they lie there: bucket, first,
-- last, and so on. Counted by hand, since asking a table for its length costs more than anything else here.
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
        own[length + 1], own[length + 2], own[length + 3] = at, count + 1, count + 1 + stop - token
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

-- Which jobs and layers that were given without a place have limits all the same; nil if that cannot be read.
local function limited_of(groups)
  local names, limited = {}, {}
  for _, group in ipairs(groups) do
    for level = 3, 4 do
      if group[level] == 0 then names[#names + 1] = name_in(group[8], level) end
    end
  end
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

local function is_a(kind, key)
  local found = redis.call('TYPE', key).ok
  return found == kind or found == 'none'
end

-- Adds {charge, tokens} to the counters of the recount under way.
local function cast_shadow(cast_by)
  local sums = {}
  for _, each in ipairs(cast_by) do
    local charge, tokens = each[1], each[2]
    local cores, gpus = string.match(charge, '(%d+) (%d+)$')
    for level = 1, 5 do
      local name = name_in(charge, level)
      local of_cores, of_gpus = name .. ':cores', name .. ':gpus'
      if cores ~= '0' then sums[of_cores] = (sums[of_cores] or 0) + cores * tokens end
      if gpus ~= '0' then sums[of_gpus] = (sums[of_gpus] or 0) + gpus * tokens end
    end
  end
  for field, sum in pairs(sums) do redis.call('HINCRBY', shadow, field, whole(sum)) end
end

-- Moves with every change. Nothing depends on its value, so one that is no number starts anew.
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

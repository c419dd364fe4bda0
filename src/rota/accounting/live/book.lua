-- script: book
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, seeding, recount, charges, limits
-- key index     hash    acct:limits:{show}    short names of items with limits in Redis
-- key charges   hash    acct:charges:{show}   charge number -> token count, fence of the booking, charge
-- key buckets   zset    acct:buckets:{show}   numbers of buckets that hold tokens
-- key shadow    hash    acct:shadow:{show}
-- key places*   hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}|acct:tokens:{show}:{bucket}
-- arg show_id   str
-- arg ask       str     limits: as many as fit; force: all, at known keys; all: all, at any key
-- arg skip      bool    skip groups at keys unknown to Redis; otherwise nothing is booked if there are any
-- arg under     int     fence of the seeding or reconciliation this belongs to; 0: a booking under the current fence
-- arg asked     packed  groups {sub, folder, job, layer, point (places), cores, gpus, charge, must_know, runs}, buckets
-- reply booked fence:int seq:int groups:packed
-- reply apart
-- reply unseeded
-- reply damaged where:str
--   Place 0 for job and layer: the caller believes that they have no limits. must_know: 1 the job has limits, 2 the
--   layer, 3 both: nothing is booked before Redis knows these.
--   A single-frame batch is a group with 2 more fields: the middles of its charges (job and layer), one per token, and
--   the common suffix; its charge field is the prefix. It is booked as a whole or not at all: if a token of the batch
--   exists already, or a job or layer has limits, the reply is apart, and the frames must be sent as single groups.
--   Groups are returned in order as {fit, level, resource, current, cap, already, otherwise, before}: the number of
--   absent tokens that are booked now; the level and resource (1 cores, 2 GPUs) that refuse the next, resource 0 if
--   Redis does not know the level; existing tokens with the same charge and with another one; and pairs of an existing
--   token booked under an earlier fence and that fence: the current limits were not checked for it.
--   Nothing is written when nothing is booked.

local groups, numbers = asked[1], asked[2]
local held = read_show()
local fence = held.fence
if under > 0 then
  if held.seeding ~= under and fence ~= under then return {'unseeded'} end
  fence = under
elseif not fence then
  return {'unseeded'}
end

-- Charge numbers would restart and collide with those of existing charges.
if not held.charges and redis.call('EXISTS', charges) == 1 then return damaged(show) end

local first_bucket = #places - #numbers
local fields, parts = spread(groups, numbers)
local live, numbered = {}, {}
for at = 1, #numbers do
  -- Remains of an earlier state that the wipe of this seeding missed, because the bucket was not listed.
  if held.seeding and not redis.call('ZSCORE', buckets, whole(numbers[at])) then
    redis.call('UNLINK', places[first_bucket + at])
  end
  local found = redis.pcall('HMGET', places[first_bucket + at], unpack(fields[at]))
  if found.err then return damaged(places[first_bucket + at]) end
  for nth = 1, #fields[at] do
    if found[nth] then numbered[#numbered + 1] = found[nth] end
  end
  live[at] = found
end

local charge_of = {}
if #numbered > 0 then
  local found = redis.pcall('HMGET', charges, unpack(numbered))
  if found.err then return damaged(charges) end
  for nth, number in ipairs(numbered) do
    local _, since, charge = read_charge(found[nth] or '')
    if not charge then return damaged(charges) end
    charge_of[number] = {since, charge}
  end
end

local limited = ask == 'all' and {} or limited_of(groups, held)
if not limited then return damaged(index) end
if #numbered > 0 or next(limited) then
  for _, group in ipairs(groups) do
    if group[11] then return {'apart'} end
  end
end

local standings = {}
local function levels_of(group)
  local levels = {}
  for at = 1, 5 do
    local place = group[at]
    if place > 0 then
      if not standings[place] then
        standings[place] = standing(places[place], at)
        if not standings[place] then return nil, places[place] end
      end
      levels[at] = standings[place]
    end
  end
  return levels
end

local function unknown_level(group, levels)
  for at = 1, 5 do
    local each = levels[at]
    if at ~= 3 and at ~= 4 then
      if not each.known then return at end
    elseif not each then
      if not group[11] and limited[name_in(group[8], at)] then return at end
    elseif not each.known and math.floor(group[9] / (at - 2)) % 2 == 1 then
      return at
    end
  end
end

-- How many of `wanted` fit, by one division per limit; cores at all levels before GPUs; names the first refusing level.
local function fit_of(group, levels, wanted)
  local fit, level, resource = wanted, 0, 0
  for r = 1, 2 do
    local ask_each = group[5 + r]
    if ask_each > 0 then
      for at = 1, 5 do
        local cap = levels[at] and levels[at].caps[r]
        if cap then
          local room = math.max(0, math.floor((cap - levels[at].used[r]) / ask_each))
          if room < fit then fit, level, resource = room, at, r end
        end
      end
    end
  end
  return fit, level, resource
end

-- Counts the absent tokens of a group; lists those that exist with its charge, with another one, or since before.
local function sorted_out(group, own)
  local absent, already, otherwise, before = 0, {}, {}, {}
  for part = 1, #own, 3 do
    local at = own[part]
    if #numbered == 0 then
      absent = absent + own[part + 2] - own[part + 1] + 1
    else
      for nth = own[part + 1], own[part + 2] do
        local number = live[at][nth]
        if not number then
          absent = absent + 1
        else
          local since, charge = unpack(charge_of[number])
          local there = charge ~= group[8] and otherwise or since == fence and already or before
          there[#there + 1] = numbers[at] * SPAN + fields[at][nth]
          if there == before then before[#before + 1] = since end
        end
      end
    end
  end
  return absent, already, otherwise, before
end

local answers, texts, cast_by = {}, {}, {}
local booked, unknown_met = 0, false
local last = held.charges or 0

-- Assigns a new number to a charge that so many tokens hold.
local function numbered_as(tokens, charge)
  last = last + 1
  local number = whole(last)
  texts[#texts + 1] = number
  texts[#texts + 1] = tokens .. ' ' .. whole(fence) .. ' ' .. charge
  return number
end

local added, lengths = {}, {}
-- Assigns the first `fit` absent tokens of a group its number, or each its own; notes those a reconciliation has
-- passed.
local function put(group, own, fit)
  local number = not group[11] and numbered_as(fit, group[8])
  local taken = 0
  for part = 1, #own, 3 do
    local at = own[part]
    local words, length = added[at] or {}, lengths[at] or 0
    local before = length
    local passed = held.recount and numbers[at] >= held.recount
    for nth = own[part + 1], own[part + 2] do
      if taken == fit then break end
      if not live[at][nth] then
        taken = taken + 1
        local charge = not number and charge_in(group, taken)
        words[length + 1], words[length + 2] = fields[at][nth], number or numbered_as(1, charge)
        length = length + 2
        if passed and charge then cast_by[#cast_by + 1] = {charge, 1} end
      end
    end
    if length > 0 then added[at], lengths[at] = words, length end
    if passed and number and length > before then cast_by[#cast_by + 1] = {group[8], (length - before) / 2} end
  end
end

for place, group in ipairs(groups) do
  local levels, where = levels_of(group)
  if not levels then return damaged(where) end
  local absent, already, otherwise, before = sorted_out(group, parts[place])
  local fit, level, resource = absent, 0, 0
  local unknown = ask ~= 'all' and fit > 0 and unknown_level(group, levels)
  if unknown then
    fit, level, unknown_met = 0, unknown, true
  elseif ask == 'limits' then
    fit, level, resource = fit_of(group, levels, fit)
  end
  if fit > 0 then
    booked = booked + fit
    for at = 1, 5 do
      local each = levels[at]
      if each and each.counted then
        each.used = {each.used[1] + fit * group[6], each.used[2] + fit * group[7]}
        each.changed = true
      end
    end
    put(group, parts[place], fit)
  end
  local current, cap = 0, 0
  if resource > 0 then
    current, cap = levels[level].used[resource], levels[level].caps[resource]
  end
  answers[#answers + 1] = {fit, level, resource, current, cap, already, otherwise, before}
end

if booked == 0 or (unknown_met and not skip) then
  return {'booked', fence, last_seq(), cmsgpack.pack(answers)}
end

for kind, key in pairs({hash = charges, zset = buckets}) do
  if not is_a(kind, key) then return damaged(key) end
end
redis.call('HSET', show, 'charges', whole(last))
for from = 1, #texts, 4000 do
  redis.call('HSET', charges, unpack(texts, from, math.min(from + 3999, #texts)))
end
for at, words in pairs(added) do
  redis.call('HSET', places[first_bucket + at], unpack(words))
  redis.call('ZADD', buckets, numbers[at], whole(numbers[at]))
end
for _, each in pairs(standings) do
  if each.changed then write_standing(each) end
end
if #cast_by > 0 then cast_shadow(cast_by) end
return {'booked', fence, next_seq(), cmsgpack.pack(answers)}

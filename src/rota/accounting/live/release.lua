-- script: release
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, seeding, recount, limits
-- key index     hash    acct:limits:{show}    short names of items with limits in Redis
-- key charges   hash    acct:charges:{show}   charge number -> token count, fence of the booking, charge
-- key buckets   zset    acct:buckets:{show}   numbers of buckets that hold tokens
-- key shadow    hash    acct:shadow:{show}
-- key places*   hash    acct:sub:{show}:{alloc}|acct:folder:{folder}|acct:job:{job}|acct:layer:{layer}|acct:point:{dept}:{show}|acct:tokens:{show}:{bucket}
-- arg show_id   str
-- arg fence     int     fence of the show when the rows were deleted; nothing is done under a higher one
-- arg booked    int     roll back, under any fence, only tokens booked under this one; 0: a release
-- arg freed     packed  groups {sub, folder, job, layer, point (places), cores, gpus, charge, 0, runs}, buckets; a
--                       single-frame batch also has the middles of its charges and their common suffix
-- reply released tokens:int seq:int            tokens with this charge that were removed
-- reply limited                                a job or layer sent with place 0 has limits: its place is needed
-- reply stale                                  the show was seeded or fenced since; the reconciliation repairs it
-- reply damaged where:str

local groups, numbers = freed[1], freed[2]
local held = read_show()
local standing_fence = held.fence or held.seeding
if not standing_fence or (booked == 0 and standing_fence > fence) then return {'stale'} end

local first_bucket = #places - #numbers
local fields, parts = spread(groups, numbers)
local found, numbered, seen = {}, {}, {}
for at = 1, #numbers do
  found[at] = redis.pcall('HMGET', places[first_bucket + at], unpack(fields[at]))
  if found[at].err then return damaged(places[first_bucket + at]) end
  for nth = 1, #fields[at] do
    local number = found[at][nth]
    if number and not seen[number] then
      seen[number] = true
      numbered[#numbered + 1] = number
    end
  end
end
if #numbered == 0 then return {'released', 0, last_seq()} end

local holds = {}
local texts = redis.pcall('HMGET', charges, unpack(numbered))
if texts.err then return damaged(charges) end
for nth, number in ipairs(numbered) do
  local tokens, since, charge = read_charge(texts[nth] or '')
  if not tokens then return damaged(charges) end
  holds[number] = {tokens = tokens, since = since, charge = charge}
end

local limited = limited_of(groups, held)
if not limited then return damaged(index) end

local gone, cast_by, removed, released = {}, {}, {}, 0
for place, group in ipairs(groups) do
  local own, charge, turn = parts[place], not group[11] and group[8], 0
  for part = 1, #own, 3 do
    local at = own[part]
    local drop, before = removed[at] or {}, released
    local length = #drop
    local passed = held.recount and numbers[at] >= held.recount
    for nth = own[part + 1], own[part + 2] do
      local hold = found[at][nth] and holds[found[at][nth]]
      turn = turn + 1
      if hold and hold.charge == (charge or charge_in(group, turn)) and (booked == 0 or hold.since == booked) then
        length = length + 1
        drop[length] = fields[at][nth]
        hold.tokens = hold.tokens - 1
        hold.changed = true
        released = released + 1
        if passed and group[11] then cast_by[#cast_by + 1] = {hold.charge, -1} end
      end
    end
    removed[at] = drop
    if released > before then
      gone[place] = (gone[place] or 0) + released - before
      if passed and not group[11] then cast_by[#cast_by + 1] = {group[8], before - released} end
    end
  end
end
if released == 0 then return {'released', 0, last_seq()} end

-- Read everything before the first write, so that damage leaves nothing half done.
local standings = {}
for place, times in pairs(gone) do
  local group = groups[place]
  if group[11] and next(limited) then return {'limited'} end
  for level = 1, 5 do
    local at = group[level]
    if at > 0 then
      local each = standings[at] or standing(places[at], level)
      if not each then return damaged(places[at]) end
      standings[at] = each
      if each.counted then
        -- A counter changed by hand stops at 0; the reconciliation corrects it.
        each.used[1] = math.max(0, each.used[1] - times * group[6])
        each.used[2] = math.max(0, each.used[2] - times * group[7])
        each.changed = true
      end
    elseif not group[11] and limited[name_in(group[8], level)] then
      return {'limited'}
    end
  end
end
if not is_a('zset', buckets) then return damaged(buckets) end

for at, drop in pairs(removed) do
  if #drop > 0 then
    local key = places[first_bucket + at]
    redis.call('HDEL', key, unpack(drop))
    if redis.call('EXISTS', key) == 0 then redis.call('ZREM', buckets, whole(numbers[at])) end
  end
end
local ended, kept = {}, {}
for number, hold in pairs(holds) do
  if hold.changed and hold.tokens > 0 then
    kept[#kept + 1] = number
    kept[#kept + 1] = hold.tokens .. ' ' .. whole(hold.since) .. ' ' .. hold.charge
  elseif hold.changed then
    ended[#ended + 1] = number
  end
end
for from = 1, #kept, 4000 do
  redis.call('HSET', charges, unpack(kept, from, math.min(from + 3999, #kept)))
end
if #ended > 0 then redis.call('HDEL', charges, unpack(ended)) end
for _, each in pairs(standings) do
  if each.changed then write_standing(each) end
end
if #cast_by > 0 then cast_shadow(cast_by) end
return {'released', released, next_seq()}

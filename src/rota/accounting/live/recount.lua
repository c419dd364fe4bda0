-- script: recount
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, recount, recounter
-- key index     hash    acct:limits:{show}    short names of items with limits in Redis
-- key charges   hash    acct:charges:{show}   charge number -> token count, fence of the booking, charge
-- key buckets   zset    acct:buckets:{show}   numbers of buckets that hold tokens
-- key shadow    hash    acct:shadow:{show}
-- key places*   hash    acct:tokens:{show}:{bucket}
-- arg fence     int     fence under which this reconciliation began
-- arg recounter str     id of this reconciliation
-- arg mark      int     where this reconciliation left the marker
-- arg numbers   packed  numbers of the buckets in `places`: the next ones below the marker, descending; empty: none
-- reply counted mark:int tokens:packed         the new marker; per bucket its number and {token in it, charge number}
-- reply moved                                  another bucket appeared between these: list them again
-- reply lost                                   another reconciliation, a seeding or a flush interfered
-- reply damaged where:str
--   The shadow is the sum of tokens in buckets from the marker on. Tokens ascend, so new ones are in that part from the
--   beginning: under any load the marker reaches the end in at most as many calls as there were buckets.

local held = read_show()
if held.fence ~= fence or held.recount ~= mark or held.recounter ~= recounter then return {'lost'} end

local found =
  redis.pcall('ZREVRANGEBYSCORE', buckets, '(' .. whole(mark), '-inf', 'WITHSCORES', 'LIMIT', 0, #numbers + 1)
if found.err then return damaged(buckets) end
local lowest, given, listed = numbers[#numbers] or mark, {}, {}
local ended = true
for _, number in ipairs(numbers) do given[number] = true end
for nth = 1, #found, 2 do
  local number = natural(found[nth])
  if not number or number ~= tonumber(found[nth + 1]) or number * SPAN >= EXACT then return damaged(buckets) end
  listed[number] = true
  if number < lowest then
    ended = false
  elseif not given[number] then
    return {'moved'}
  end
end
if ended then lowest = ENDED end

local told, times, order = {}, {}, {}
for at, place in ipairs(places) do
  local tokens = redis.pcall('HGETALL', place)
  if tokens.err or (#tokens == 0 and listed[numbers[at]]) then return damaged(place) end
  for nth = 2, #tokens, 2 do
    local within, number = natural(tokens[nth - 1]), tokens[nth]
    if not within or within >= SPAN then return damaged(place) end
    if not times[number] then
      times[number] = 0
      order[#order + 1] = number
    end
    times[number] = times[number] + 1
  end
  told[at] = {numbers[at], tokens}
end
if #order > 0 then
  local texts = redis.pcall('HMGET', charges, unpack(order))
  if texts.err then return damaged(charges) end
  local cast_by = {}
  for nth, number in ipairs(order) do
    local _, _, charge = read_charge(texts[nth] or '')
    if not charge or not string.find(charge, '^[%x-]+ [%x-]+ [%x-]+ [%x-]+ [%x-]+ %d+ %d+$') or not amounts_in(charge) then
      return damaged(charges)
    end
    cast_by[nth] = {charge, times[number]}
  end
  if not cast_shadow(cast_by) then return {'lost'} end
end
redis.call('HSET', show, 'recount', whole(lowest))
next_seq()
return {'counted', lowest, cmsgpack.pack(told)}

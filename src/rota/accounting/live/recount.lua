-- script: recount
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, recount
-- key index     hash    acct:limits:{show}    short names of what has limits in Redis
-- key charges   hash    acct:charges:{show}   number -> how many tokens hold it, since which fence, the charge
-- key buckets   zset    acct:buckets:{show}   buckets that hold tokens, by their number
-- key shadow    hash    acct:shadow:{show}
-- key places*   hash    acct:tokens:{show}:{bucket}
-- arg fence     int     under which this recount began
-- arg mark      int     where this recount left the mark
-- arg numbers   packed  of the buckets in `places`: the next ones below the mark, descending; none: there is none
-- reply counted mark:int tokens:packed         the new mark; per bucket its number and {token within it, charge number}
-- reply moved                                  there is another bucket between these: ask for them again
-- reply lost                                   another recount, a seeding or a flush came between
-- reply damaged where:str
--   The shadow is what tokens hold in buckets from the mark on. Tokens rise, so what is new lies there from the
--   beginning: whatever is booked meanwhile, the mark comes down in at most as many calls as there were buckets.

local held = read_show()
if held.fence ~= fence or held.recount ~= mark then return {'lost'} end

local found =
  redis.pcall('ZREVRANGEBYSCORE', buckets, '(' .. whole(mark), '-inf', 'WITHSCORES', 'LIMIT', 0, #numbers + 1)
if found.err then return damaged(buckets) end
local lowest, given = numbers[#numbers] or mark, {}
local ended = true
for _, number in ipairs(numbers) do given[number] = true end
for nth = 1, #found, 2 do
  local number = natural(found[nth])
  if not number or number ~= tonumber(found[nth + 1]) or number * SPAN >= EXACT then return damaged(buckets) end
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
  if tokens.err or #tokens == 0 then return damaged(place) end
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

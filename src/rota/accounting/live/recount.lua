-- script: recount
-- use keeping
-- key seq       string  acct:seq
-- key show      hash    acct:show:{show}      fence, run, recount
-- key charges   hash    acct:charges:{show}   number -> how many tokens hold it, and the charge
-- key buckets   zset    acct:buckets:{show}   buckets that hold tokens, by their number
-- key shadow    hash    acct:shadow:{show}
-- key places*   hash    acct:tokens:{show}:{bucket}
-- arg fence     int     under which this recount began
-- arg mark      int     where this recount left the mark
-- arg numbers   packed  of the buckets in `places`: the next ones after the mark, in order; none: there is none
-- reply counted mark:int tokens:packed         the new mark; per bucket its number and {token within it, charge number}
-- reply moved                                  the buckets changed meanwhile: ask for them again
-- reply lost                                   another recount, a seeding or a flush came between
-- reply damaged where:str

local held = read_show()
if held.fence ~= fence or held.recount ~= mark then return {'lost'} end

local wanted = math.max(1, #numbers)
local found = redis.pcall('ZRANGEBYSCORE', buckets, '(' .. whole(mark), '+inf', 'LIMIT', 0, wanted)
if found.err then return damaged(buckets) end
if #found ~= #numbers then return {'moved'} end
for at, number in ipairs(numbers) do
  if tonumber(found[at]) ~= number then return {'moved'} end
end
if #numbers == 0 then
  redis.call('HSET', show, 'recount', whole(ENDED))
  next_seq()
  return {'counted', ENDED, cmsgpack.pack({})}
end

local told, times, order = {}, {}, {}
for at, place in ipairs(places) do
  local tokens = redis.pcall('HGETALL', place)
  if tokens.err then return damaged(place) end
  for nth = 2, #tokens, 2 do
    local number = tokens[nth]
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
    local _, charge = read_charge(texts[nth] or '')
    if not charge or #charge < 188 then return damaged(charges) end
    cast_by[nth] = {charge, times[number]}
  end
  cast_shadow(cast_by)
end
redis.call('HSET', show, 'recount', whole(numbers[#numbers]))
next_seq()
return {'counted', numbers[#numbers], cmsgpack.pack(told)}

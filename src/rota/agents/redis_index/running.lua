-- script: running
-- use scores
-- key working  zset  working|working:{group}
-- key runs     hash  working-runs|working-runs:{group}   name -> run, owner, due (us), acquired (us)
-- arg offset   int
-- arg limit    int   at most 200
-- reply running now_us:int names:bytes* deadlines_us:int* runs:int* owners:int*   0 without a stamp; oldest deadline first

local names, deadlines, numbers, owners = {}, {}, {}, {}
local found = redis.call('ZRANGE', working, offset, offset + limit - 1, 'WITHSCORES')
for at = 1, #found, 2 do
  local place = #names + 1
  local run, owner = read_stamp(redis.call('HGET', runs, found[at]))
  names[place], deadlines[place], numbers[place], owners[place] = found[at], micros(found[at + 1]), run or 0, owner or 0
end
return {'running', now_us(), names, deadlines, numbers, owners}

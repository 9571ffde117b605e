"""The scripts that make each change of the store one atomic step. They know keys, not meanings.

All keys of a cluster share the hash tag ``{tmd:<cluster>}``, so they live in one slot. ``ARGV[1]``
is always the key prefix; what a script needs beyond ``KEYS`` it finds under that prefix.
Numbers stay below 2^53 and travel as strings where Redis would round or truncate them.
"""

ACQUIRE = """
-- KEYS leader, epoch   ARGV prefix, holder, ttl ms, floor
local held = redis.call('GET', KEYS[1])
if held then
  local holder, epoch = string.match(held, '^(.*)|(%d+)$')
  if holder ~= ARGV[2] then
    return {0, holder, redis.call('PTTL', KEYS[1])}
  end
  -- Below it after a fail-over that lost writes: nobody would obey that epoch any more.
  if tonumber(epoch) >= tonumber(ARGV[4]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    return {1, epoch, 0}
  end
end
-- Grows even after the data was lost, because the clock does; and above whatever the caller knows.
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0') + 1
epoch = math.max(epoch, tonumber(redis.call('TIME')[1]) * 65536, tonumber(ARGV[4]) + 1)
local text = string.format('%.0f', epoch)
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], ARGV[2] .. '|' .. text, 'PX', ARGV[3])
return {1, text, 0}
"""

RELEASE = """
-- KEYS leader   ARGV prefix, holder
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^(.*)|%d+$') == ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', ARGV[1] .. 'wake', 'lease')
  return 1
end
return 0
"""

PUT_JOB = """
-- KEYS job, jobs   ARGV prefix, name, lease epoch, expected revision, revision, record
local fence = redis.call('HGET', KEYS[1], 'fence') or '0'
if tonumber(ARGV[3]) < tonumber(fence) then
  return {'stale', fence}
end
local stored = redis.call('HGET', KEYS[1], 'revision') or '0'
if tonumber(stored) ~= tonumber(ARGV[4]) then
  return {'conflict', stored}
end
redis.call('HSET', KEYS[1], 'fence', ARGV[3], 'revision', ARGV[5], 'record', ARGV[6])
redis.call('SADD', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[1] .. 'wake', 'jobs')
return {'ok', ARGV[5]}
"""

RESTORE_JOB = """
-- KEYS job, jobs   ARGV prefix, name, lease epoch, revision, record
local stored = redis.call('HGET', KEYS[1], 'revision') or '0'
if tonumber(stored) >= tonumber(ARGV[4]) then
  return 0
end
local fence = redis.call('HGET', KEYS[1], 'fence') or '0'
if tonumber(ARGV[3]) > tonumber(fence) then
  fence = ARGV[3]
end
redis.call('HSET', KEYS[1], 'fence', fence, 'revision', ARGV[4], 'record', ARGV[5])
redis.call('SADD', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[1] .. 'wake', 'all')
return 1
"""

JOBS = """
-- KEYS jobs   ARGV prefix
local records = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('HGET', ARGV[1] .. 'job:' .. name, 'record')
  if record then table.insert(records, record) end
end
return records
"""

SNAPSHOT = """
-- KEYS hosts, jobs, drains, rehearsals, paused, breaker   ARGV prefix
local hosts = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local status = redis.call('GET', ARGV[1] .. 'host:' .. name)
  if status then
    table.insert(hosts, status)
  else
    redis.call('SREM', KEYS[1], name)  -- it adds itself again with its next heartbeat
  end
end
local records = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  local record = redis.call('HGET', ARGV[1] .. 'job:' .. name, 'record')
  if record then table.insert(records, record) end
end
local drains, rehearsals = redis.call('HVALS', KEYS[3]), redis.call('HVALS', KEYS[4])
local paused, breaker = redis.call('EXISTS', KEYS[5]), redis.call('GET', KEYS[6])
return {hosts, records, drains, rehearsals, paused, breaker or ''}
"""

PUT_HOST = """
-- KEYS host, hosts   ARGV prefix, name, status, ttl ms, wake
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[2], ARGV[2])
if ARGV[5] == '1' then
  redis.call('PUBLISH', ARGV[1] .. 'wake', 'hosts')
end
return 1
"""

PUBLISH_ALERT = """
-- KEYS alerts, told   ARGV prefix, channel, mark, alert, longest, seal
-- A daemon that lost the answer says it again: what was told once is not told twice.
if redis.call('ZADD', KEYS[2], 'NX', redis.call('TIME')[1], ARGV[3]) == 0 then
  return 0
end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -tonumber(ARGV[5]) - 1)
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[5], '*', 'alert', ARGV[4], 'seal', ARGV[6])
redis.call('PUBLISH', ARGV[2], ARGV[4])
return 1
"""

HOLDS_ALERT = """
-- KEYS told   ARGV prefix, mark, longest, at
if redis.call('ZSCORE', KEYS[1], ARGV[2]) then
  return 1
end
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[3]) then
  return 0
end
-- Full: what is older than all that is remembered was forgotten, not lost.
local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return tonumber(ARGV[4]) < tonumber(oldest) and 1 or 0
"""

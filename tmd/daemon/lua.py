"""Lua scripts: each change that depends on what is stored is one atomic step.

All keys of a cluster share the hash tag ``{tmd:<cluster>}``, so they are in one slot. ``ARGV[1]``
is always the key prefix; keys beyond ``KEYS`` are built from it. Numbers stay below 2^53 and are
passed as strings where Redis would round or truncate them.

Any client of Redis may have written any value at any key. Numbers are checked before they are
compared. A value longer than any that a member writes is returned as an empty string, which has
no valid seal.
"""

from functools import cache

from tmd.daemon.record_changes import LONGEST_TEXT


@cache
def lean(script: str) -> str:
    """``script`` without indentation and comment lines: some requests send the text each time."""
    lines = (line.strip() for line in script.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("--"))


CHECKED = (
    f"local LONGEST = {LONGEST_TEXT}"
    + """
-- A member's count: a whole number of at most 15 digits, so that it and its neighbours are exact.
local function number(text)
  if text and #text <= 15 and string.match(text, '^%d+$') then return tonumber(text) end
  return nil
end
local FORGED_FROM = 900000000000000  -- epochs: the clock reaches this in the year 2405
local function value(key)
  if redis.call('STRLEN', key) > LONGEST then return '' end
  return redis.call('GET', key)
end
local function field(key, name)
  if redis.call('HSTRLEN', key, name) > LONGEST then return '' end
  return redis.call('HGET', key, name)
end
local function is_name(text) return #text <= 1000 end
-- Names and values of the fields, alternating.
local function fields(key)
  local found = {}
  for _, name in ipairs(redis.call('HKEYS', key)) do
    if is_name(name) then
      table.insert(found, name)
      table.insert(found, field(key, name))
    end
  end
  return found
end
"""
)

WAKING = """
-- Only the leader decides: ten thousand hosts would be woken for nothing.
local function wake_leader(what)
  local held = redis.call('GETRANGE', ARGV[1] .. 'leader', 0, 999)
  local holder = string.match(held, '^(.*)|%d+$') or ''
  redis.call('PUBLISH', ARGV[1] .. 'wake:' .. holder, what)
  redis.call('PUBLISH', ARGV[1] .. 'wake:observers', what)
end
"""

WAKE_LEADER = (
    WAKING
    + """
-- ARGV prefix, message
wake_leader(ARGV[2])
return 1
"""
)

WAKE_HOSTS = """
-- ARGV prefix, message, names under which daemons listen
for n = 3, #ARGV do
  redis.call('PUBLISH', ARGV[1] .. 'wake:' .. ARGV[n], ARGV[2])
end
redis.call('PUBLISH', ARGV[1] .. 'wake:observers', ARGV[2])
return 1
"""

ACQUIRE = (
    CHECKED
    + """
-- KEYS leader, epoch   ARGV prefix, holder, ttl ms, floor
-- GETRANGE: the beginning of an overlong value is enough to refuse it.
local held = redis.call('GETRANGE', KEYS[1], 0, 999)
local floor = tonumber(ARGV[4])
if held ~= '' then
  local holder, digits = string.match(held, '^(.*)|(%d+)$')
  local epoch, left = number(digits), redis.call('PTTL', KEYS[1])
  if epoch and epoch >= FORGED_FROM then epoch = nil end
  -- No member writes a lease without an epoch or an expiry, or one for hours. It gets a normal
  -- expiry once, so that it lapses.
  local ttl = tonumber(ARGV[3])
  if left < 0 or left > (epoch and math.max(3600000, 10 * ttl) or ttl) then
    redis.call('PEXPIRE', KEYS[1], ttl)
    left = ttl
  end
  if not epoch or holder ~= ARGV[2] then
    return {0, holder or held, left}
  end
  -- The epoch is below the floor after a fail-over that lost writes: no daemon would obey it.
  if epoch >= floor then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
    return {1, digits, 0}
  end
end
-- The clock makes it grow even after data loss, and it exceeds every epoch the caller knows.
-- A counter that no member wrote counts as lost.
local counter = number(redis.call('GETRANGE', KEYS[2], 0, 15)) or 0
if counter >= FORGED_FROM then counter = 0 end
local epoch = math.max(counter + 1, tonumber(redis.call('TIME')[1]) * 65536, floor + 1)
local text = string.format('%.0f', epoch)
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], ARGV[2] .. '|' .. text, 'PX', ARGV[3])
return {1, text, 0}
"""
)

RELEASE = """
-- KEYS leader   ARGV prefix, holder
local held = redis.call('GETRANGE', KEYS[1], 0, 999)
if string.match(held, '^(.*)|%d+$') == ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', ARGV[1] .. 'wake', 'lease')
  return 1
end
return 0
"""

LEADER = """
-- KEYS leader   ARGV prefix
return string.match(redis.call('GETRANGE', KEYS[1], 0, 999), '^(.*)|%d+$') or ''
"""

VALUE = (
    CHECKED
    + """
-- KEYS a string   ARGV prefix
return value(KEYS[1])
"""
)

SWAP_FIELD = (
    WAKING
    + """
-- KEYS a hash   ARGV prefix, field, value that was seen ('': none), new value ('': none)
if (redis.call('HGET', KEYS[1], ARGV[2]) or '') ~= ARGV[3] then
  return 0
end
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[1], ARGV[2])
else
  redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
end
wake_leader('leader')
return 1
"""
)

FIELDS = (
    CHECKED
    + """
-- KEYS a hash   ARGV prefix
return fields(KEYS[1])
"""
)

ALERTS = """
-- KEYS alerts   ARGV prefix, first, count
local found = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[2], '+', 'COUNT', ARGV[3])) do
  local texts = {alert = '', seal = ''}
  for n = 1, #entry[2], 2 do
    local name, text = entry[2][n], entry[2][n + 1]
    if texts[name] and #text <= 1048576 then texts[name] = text end
  end
  table.insert(found, {entry[1], texts.alert, texts.seal})
end
return found
"""

PUBLISH_ALERT = """
-- KEYS alerts, told   ARGV prefix, channel, mark, alert, longest, seal
-- A daemon that lost the reply publishes again: the mark prevents a duplicate.
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
-- The set is full: a mark older than its oldest entry has expired; it was not lost.
local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return tonumber(ARGV[4]) < (tonumber(oldest) or 0) and 1 or 0
"""

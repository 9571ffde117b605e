"""Lua scripts that make each change of the store one atomic step. They see keys, not meanings.

All keys of a cluster share the hash tag ``{tmd:<cluster>}``, so they are in one slot. ``ARGV[1]``
is always the key prefix; keys beyond ``KEYS`` are built from it. Numbers stay below 2^53 and are
passed as strings where Redis would round or truncate them.

Any client of Redis may have written any value at any key. Numbers are checked before they are
compared. A value longer than any that a member writes is returned as an empty string, which has
no valid seal.
"""

from functools import cache

from tmd.daemon.record_changes import LONGEST_CHANGE, LONGEST_TEXT


@cache
def lean(script: str) -> str:
    """``script`` without comments that fill a line, and indentation: ten thousand hosts send one
    each second."""
    lines = (line.strip() for line in script.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("--"))


_CHECKED = (
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

_LEADER = """
-- Only the leader decides: ten thousand hosts would be woken for nothing.
local function wake_leader(what)
  local held = redis.call('GETRANGE', ARGV[1] .. 'leader', 0, 999)
  local holder = string.match(held, '^(.*)|%d+$') or ''
  redis.call('PUBLISH', ARGV[1] .. 'wake:' .. holder, what)
  redis.call('PUBLISH', ARGV[1] .. 'wake:observers', what)
end
"""

WAKE_LEADER = (
    _LEADER
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
    _CHECKED
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

_MARK = (
    f"local LONGEST_CHANGE = {LONGEST_CHANGE}"
    + """
-- Revision, fence and seal of a stored record, which tell it from all others.
local function mark(place)
  local found = {}
  for n, name in ipairs({'revision', 'fence', 'seal'}) do found[n] = field(place, name) or '' end
  return table.concat(found, ' '), found
end
local CHANGES = 32  -- kept of each record: a move makes five, and some hosts read once a minute
-- The field for the change from this revision to the next.
local function slot(revision) return string.format('change:%.0f', revision % CHANGES) end
"""
)

PUT_JOB = (
    _CHECKED
    + _MARK
    + """
-- KEYS job, jobs   ARGV prefix, name, lease epoch, expected revision, revision, record, its seal,
-- mark of the record that the writer has read, the change from it to the new one ('': none)
local fence = number(redis.call('HGET', KEYS[1], 'fence') or '0')
local stored = number(redis.call('HGET', KEYS[1], 'revision') or '0')
if not fence or not stored then
  return {'forged', '0'}
end
if tonumber(ARGV[3]) < fence then
  return {fence >= FORGED_FROM and 'forged' or 'stale', string.format('%.0f', fence)}
end
if stored ~= tonumber(ARGV[4]) then
  return {'conflict', string.format('%.0f', stored)}
end
-- It stands between its two marks: readers follow it only from the first of them, and only if it
-- leads to the record that is stored, whatever another version writes meanwhile.
if ARGV[9] ~= '' and mark(KEYS[1]) == ARGV[8] then
  local after = table.concat({ARGV[5], ARGV[3], ARGV[7]}, ' ')
  redis.call('HSET', KEYS[1], slot(stored), ARGV[8] .. '\\n' .. after .. '\\n' .. ARGV[9])
else
  redis.call('HDEL', KEYS[1], slot(stored))
end
redis.call('HSET', KEYS[1], 'fence', ARGV[3], 'revision', ARGV[5], 'record', ARGV[6],
  'seal', ARGV[7])
redis.call('SADD', KEYS[2], ARGV[2])
return {'ok', ARGV[5]}
"""
)

RESTORE_JOB = (
    _CHECKED
    + _LEADER
    + """
-- KEYS job, jobs   ARGV prefix, name, lease epoch, revision, record, its seal
local stored = number(redis.call('HGET', KEYS[1], 'revision') or '0')
local fence = number(redis.call('HGET', KEYS[1], 'fence') or '0')
if not stored or not fence then
  return -1
end
if stored >= tonumber(ARGV[4]) then
  -- The list of jobs may be lost without their records. Nobody would decide about this one.
  if redis.call('SADD', KEYS[2], ARGV[2]) == 1 then wake_leader('leader') end
  return 0
end
fence = string.format('%.0f', math.max(fence, tonumber(ARGV[3])))
redis.call('HSET', KEYS[1], 'fence', fence, 'revision', ARGV[4], 'record', ARGV[5],
  'seal', ARGV[6])
redis.call('SADD', KEYS[2], ARGV[2])
wake_leader('leader')
return 1
"""
)

_RECORDS = (
    _MARK
    + """
-- The changes that lead from one mark to another, oldest first; nil if they are not all there, or
-- the record is hardly longer.
local function changes(place, from, to)
  local found, left = {}, redis.call('HSTRLEN', place, 'record') / 2
  for _ = 1, CHANGES do
    local revision = number(string.match(from, '^%d+'))
    local name = revision and slot(revision)
    if not name or redis.call('HSTRLEN', place, name) > LONGEST_CHANGE + 1000 then return nil end
    local text = redis.call('HGET', place, name) or ''
    local before, after, change = string.match(text, '^([^\\n]*)\\n([^\\n]*)\\n(.*)$')
    if before ~= from then return nil end
    left = left - #change
    if left < 0 then return nil end
    table.insert(found, change)
    if after == to then return found end
    from = after
  end
  return nil
end
-- Name, revision, fence, seal and record of each of the jobs, in turn. The caller has read records
-- with the marks that are ARGV from number first on: of such a job it gets no record if that has
-- not changed, and its changes alone if they are kept. A record may have megabytes, and the hosts
-- of a job ask for it each second.
local function jobs(names, first)
  local found, known = {}, {}
  for n = first, #ARGV, 2 do known[ARGV[n]] = ARGV[n + 1] end
  for _, name in ipairs(names) do
    if is_name(name) then
      local place = ARGV[1] .. 'job:' .. name
      local now, parts = mark(place)
      local same = known[name] == now
      local record = not same
        and (known[name] and changes(place, known[name], now) or field(place, 'record'))
      if same or record then
        for _, each in ipairs({name, parts[1], parts[2], parts[3], record}) do
          table.insert(found, each)
        end
      end
    end
  end
  return found
end
"""
)

JOBS = (
    _CHECKED
    + _RECORDS
    + """
-- KEYS jobs   ARGV prefix; name, and revision, fence and seal, of each known record
return jobs(redis.call('SMEMBERS', KEYS[1]), 2)
"""
)

JOBS_NAMED = (
    _CHECKED
    + _RECORDS
    + """
-- ARGV prefix; name, and revision, fence and seal, of each record that is asked for; these are
-- empty if it is not known
local names = {}
for n = 2, #ARGV, 2 do table.insert(names, ARGV[n]) end
return jobs(names, 2)
"""
)

SNAPSHOT = (
    _CHECKED
    + _RECORDS
    + """
-- KEYS hosts, jobs, drains, rehearsals, paused, breaker
-- ARGV prefix, how many hosts are read ('': all), their names, then as for the records alone
-- The hosts that are not read come as names alone, in one text: a reply of ten thousand parts takes
-- a client long to read.
local wanted, first = nil, 3
if ARGV[2] ~= '' then
  wanted, first = {}, 3 + ARGV[2]
  for n = 3, first - 1 do wanted[ARGV[n]] = true end
end
local hosts, others = {}, {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local place, status = ARGV[1] .. 'host:' .. name, false
  if is_name(name) and wanted and not wanted[name] then
    if redis.call('EXISTS', place) == 1 then
      table.insert(others, name)
      status = true
    end
  elseif is_name(name) then
    status = value(place)
    if status then
      table.insert(hosts, name)
      table.insert(hosts, status)
    end
  end
  if not status then
    redis.call('SREM', KEYS[1], name)  -- the host's next heartbeat adds it again
  end
end
local paused, breaker = redis.call('EXISTS', KEYS[5]), value(KEYS[6])
local records = jobs(redis.call('SMEMBERS', KEYS[2]), first)
return {hosts, table.concat(others, '\\n'), records, fields(KEYS[3]), fields(KEYS[4]), paused,
  breaker or false}
"""
)

VALUE = (
    _CHECKED
    + """
-- KEYS a string   ARGV prefix
return value(KEYS[1])
"""
)

SWAP_FIELD = (
    _LEADER
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
    _CHECKED
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

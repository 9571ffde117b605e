"""Lua scripts about the records of jobs, and the one that reads the whole cluster."""

from tmd.daemon.lua import CHECKED, WAKING
from tmd.daemon.record_changes import LONGEST_CHANGE

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

_PLACES = """
-- Where the record of a job is. Once the job has ended and is not listed, it has another place: a
-- leader of 0.1.0 takes the job for deleted.
local function unlisted(name) return ARGV[1] .. 'ended:' .. name end
local function place_of(name)
  local place = ARGV[1] .. 'job:' .. name
  if redis.call('EXISTS', place) == 1 then return place end
  return unlisted(name)
end
-- Fence and revision of a record, 0 if there is none; nil for one that no member wrote.
local function counts(place)
  return number(redis.call('HGET', place, 'fence') or '0'),
    number(redis.call('HGET', place, 'revision') or '0')
end
"""

PUT_JOB = (
    CHECKED
    + _MARK
    + _PLACES
    + """
-- KEYS job, jobs   ARGV prefix, name, lease epoch, expected revision, revision, record, its seal,
-- mark of the record that the writer has read, the change from it to the new one ('': none)
local fence, stored = counts(place_of(ARGV[2]))
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
redis.call('DEL', unlisted(ARGV[2]))
redis.call('SADD', KEYS[2], ARGV[2])
return {'ok', ARGV[5]}
"""
)

UNLIST_JOB = (
    CHECKED
    + _PLACES
    + """
-- KEYS job, jobs   ARGV prefix, name, revision, lifetime of the record from now on, in ms
if redis.call('HGET', KEYS[1], 'revision') ~= ARGV[3] then
  return 0
end
local place = unlisted(ARGV[2])
for _, name in ipairs({'fence', 'revision', 'record', 'seal'}) do
  redis.call('HSET', place, name, field(KEYS[1], name) or '')
end
redis.call('PEXPIRE', place, ARGV[4])
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[2])
return 1
"""
)

RESTORE_JOB = (
    CHECKED
    + WAKING
    + _PLACES
    + """
-- KEYS job, jobs   ARGV prefix, name, lease epoch, revision, record, its seal
local place = place_of(ARGV[2])
local fence, stored = counts(place)
if not stored or not fence then
  return -1
end
if stored >= tonumber(ARGV[4]) then
  -- The list of jobs may be lost without their records. Nobody would decide about this one.
  if place == KEYS[1] and redis.call('SADD', KEYS[2], ARGV[2]) == 1 then
    wake_leader('leader')
  end
  return 0
end
fence = string.format('%.0f', math.max(fence, tonumber(ARGV[3])))
redis.call('HSET', KEYS[1], 'fence', fence, 'revision', ARGV[4], 'record', ARGV[5],
  'seal', ARGV[6])
redis.call('DEL', unlisted(ARGV[2]))
redis.call('SADD', KEYS[2], ARGV[2])
wake_leader('leader')
return 1
"""
)

_RECORDS = (
    _MARK
    + _PLACES
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
-- of a job ask for it each second. `also`: look for unlisted records, too.
local function jobs(names, first, also)
  local found, known = {}, {}
  for n = first, #ARGV, 2 do known[ARGV[n]] = ARGV[n + 1] end
  for _, name in ipairs(names) do
    if is_name(name) then
      local place = also and place_of(name) or ARGV[1] .. 'job:' .. name
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
    CHECKED
    + _RECORDS
    + """
-- KEYS jobs   ARGV prefix; name, and revision, fence and seal, of each known record
return jobs(redis.call('SMEMBERS', KEYS[1]), 2)
"""
)

JOBS_NAMED = (
    CHECKED
    + _RECORDS
    + """
-- ARGV prefix; name, and revision, fence and seal, of each record that is asked for; these are
-- empty if it is not known
local names = {}
for n = 2, #ARGV, 2 do table.insert(names, ARGV[n]) end
return jobs(names, 2, true)
"""
)

SNAPSHOT = (
    CHECKED
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

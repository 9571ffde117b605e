"""Print every alert of a cluster once: ``follow_alerts.py redis://host:6379/0 CLUSTER [CURSOR]``.

Kept with the last cursor printed, it goes on exactly where it stopped.
"""

import sys
import time

import redis

url, cluster, cursor = [*sys.argv[1:], "0"][:3]
client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=10)
stream = f"{{tmd:{cluster}}}:alerts"
while True:
    try:
        for _, entries in client.xread({stream: cursor}, block=5000) or []:
            for cursor, fields in entries:  # the last one is where to go on
                print(cursor, fields["alert"], flush=True)
    except (redis.ConnectionError, redis.TimeoutError):
        time.sleep(1)  # Redis is away: the same cursor finds what came meanwhile

"""Print every alert of a cluster once: ``follow_alerts.py URL CLUSTER [CURSOR]``.

Kept with the last cursor printed, it goes on exactly where it stopped.
"""

import sys
import time

import redis

if len(sys.argv) < 3:
    sys.exit("usage: follow_alerts.py redis://user:password@host:6379/0 CLUSTER [CURSOR]")
url, cluster, cursor = [*sys.argv[1:], "0"][:3]
client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=10)
stream = f"{{tmd:{cluster}}}:alerts"
while True:
    try:
        for _, entries in client.xread({stream: cursor}, block=5000) or []:
            for cursor, fields in entries:  # the last one is where to go on
                print(cursor, fields["alert"], flush=True)
    except redis.AuthenticationError as error:
        sys.exit(f"{error}: check user and password in the URL")
    except (redis.ConnectionError, redis.TimeoutError):
        time.sleep(1)  # Redis is away: the same cursor finds what came meanwhile

#!/bin/sh
# One of three Redis servers, or the Sentinel beside one. The Sentinels say who is the master; as long
# as none of them knows, it is the first server. All of them ask for the same password, also each other.
#   redis.sh redis|sentinel     HOSTS, ME, REDIS_PASSWORD, REDIS_PORT, SENTINEL_PORT, DATA
set -eu

case ${REDIS_PASSWORD:?redis.sh: it is empty: give the Secret the key redis-password} in
*"
"*)
    echo "redis.sh: REDIS_PASSWORD has a line break: give the key redis-password of the Secret none" >&2
    exit 1
    ;;
esac
# As a word of a configuration file of Redis: within double quotes it takes \" and \\ for " and \.
PASSWORD="\"$(printf '%s' "$REDIS_PASSWORD" | sed 's/[\\"]/\\&/g')\""

ask() {
    REDISCLI_AUTH=$REDIS_PASSWORD timeout 3 redis-cli -h "$1" -p "$SENTINEL_PORT" sentinel "$2" tmd 2>/dev/null || true
}

# The own Sentinel last: one that has just started knows what it was told, and hears of the others
# through the master only.
ORDER="$(printf '%s\n' $HOSTS | grep -vxF "$ME") $ME"

master() {
    for host in $ORDER; do
        found=$(ask "$host" get-master-addr-by-name | head -n 1)
        case $found in
        "" | *" "*) ;; # no answer, or an error
        *)
            echo "$found"
            return
            ;;
        esac
    done
    echo "${HOSTS%% *}"
}

replicas_known() {
    for host in $ORDER; do
        if ask "$host" replicas | grep -q "^name$"; then return 0; fi
    done
    return 1
}

now=$(master)
case $1 in
redis)
    # A master that comes back empty would empty its replicas: it waits until one has taken over.
    tries=${WAIT:-60}
    while [ "$now" = "$ME" ] && [ ! -e "$DATA/appendonlydir" ] && [ "$tries" -gt 0 ] &&
        replicas_known; do
        sleep 1
        tries=$((tries - 1))
        now=$(master)
    done
    if [ "$now" = "$ME" ]; then of=; else of="replicaof $now $REDIS_PORT"; fi
    (
        umask 077
        cat >"$DATA/redis.conf" <<CONF
bind ${BIND:-* -::*}
port $REDIS_PORT
dir $DATA
appendonly yes
save ""
requirepass $PASSWORD
masterauth $PASSWORD
replica-announce-ip $ME
replica-announce-port $REDIS_PORT
repl-diskless-sync-delay 0
$of
CONF
    )
    exec redis-server "$DATA/redis.conf"
    ;;
sentinel)
    (
        umask 077
        cat >"$DATA/sentinel.conf" <<CONF
bind ${BIND:-* -::*}
port $SENTINEL_PORT
dir $DATA
requirepass $PASSWORD
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $ME
sentinel announce-port $SENTINEL_PORT
sentinel monitor tmd $now $REDIS_PORT 2
sentinel auth-pass tmd $PASSWORD
sentinel down-after-milliseconds tmd ${DOWN_AFTER_MS:-5000}
sentinel failover-timeout tmd ${FAILOVER_MS:-15000}
CONF
    )
    exec redis-server "$DATA/sentinel.conf" --sentinel
    ;;
esac

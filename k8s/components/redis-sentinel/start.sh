#!/bin/sh
# start.sh redis|sentinel: the two containers of each pod. Who is master, they ask the Sentinels of all pods; as long as
# none of these knows anybody, it is the first pod. Both rewrite their configuration, so it is made in a volume.
set -eu
umask 077
pods="$SERVICE-0.$SERVICE $SERVICE-1.$SERVICE $SERVICE-2.$SERVICE"
me=$POD_NAME.$SERVICE
REDISCLI_AUTH=$(cat /etc/kvtier/acl/internal)
export REDISCLI_AUTH

ask() {
  timeout 2 redis-cli --user sentinel --no-auth-warning "$@" 2>/dev/null
}

master() {
  for pod in $pods; do
    said=$(ask -h "$pod" -p 26379 sentinel get-master-addr-by-name kvtier | head -n 1)
    case $said in
      "$SERVICE"-*) echo "$said" && return ;;
    esac
  done
}

# The master, after some patience: with nobody who knows any it is the first start. A Redis does not take that from this
# pod's own past: it has nothing any more, the others would become as empty, and they choose one of them within seconds.
whom() {
  tries=0
  while [ "$tries" -lt 30 ]; do
    found=$(master)
    case $found in
      "") [ "$tries" -lt 10 ] || break ;;
      "$me") [ "$1" = redis ] || break ;;
      *) break ;;
    esac
    tries=$((tries + 1))
    sleep 1
  done
  echo "${found:-${pods%% *}}"
}

case $1 in
  redis)
    to=$(whom redis)
    {
      echo "include /etc/kvtier/redis/redis.conf"
      echo "dir /data"
      echo "replica-announce-ip $me"
      echo "masteruser replica"
      echo "masterauth $REDISCLI_AUTH"
      echo "repl-diskless-sync-delay 1"
      [ "$to" = "$me" ] || echo "replicaof $to 6379"
    } >/run/redis/redis.conf
    exec redis-server /run/redis/redis.conf
    ;;
  sentinel)
    if [ ! -e /run/redis/sentinel.conf ]; then
      to=$(whom sentinel)
      tries=0
      # A Sentinel ends when a name means nobody yet.
      until [ "$tries" -ge 30 ] || ask -h "$to" ping >/dev/null; do
        tries=$((tries + 1))
        sleep 1
      done
      {
        echo "port 26379"
        echo "dir /run/redis"
        echo "aclfile /etc/kvtier/acl/sentinel.acl"
        echo "sentinel resolve-hostnames yes"
        echo "sentinel announce-hostnames yes"
        echo "sentinel announce-ip $me"
        # The same whenever it comes back, so that the others count it once.
        echo "sentinel myid $(printf %s "$me" | sha1sum | cut -d ' ' -f 1)"
        echo "sentinel sentinel-user sentinel"
        echo "sentinel sentinel-pass $REDISCLI_AUTH"
        echo "sentinel monitor kvtier $to 6379 2"
        echo "sentinel auth-user kvtier sentinel"
        echo "sentinel auth-pass kvtier $REDISCLI_AUTH"
        echo "sentinel down-after-milliseconds kvtier 5000"
        echo "sentinel failover-timeout kvtier 15000"
        echo "sentinel parallel-syncs kvtier 2"
      } >/run/redis/sentinel.conf.new
      mv /run/redis/sentinel.conf.new /run/redis/sentinel.conf
    fi
    exec redis-server /run/redis/sentinel.conf --sentinel
    ;;
esac

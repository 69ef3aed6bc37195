#!/bin/sh
# Makes what no file here holds, once: sh k8s/secrets.sh | kubectl apply -f -
# For another namespace than kvtier: NAMESPACE=... sh k8s/secrets.sh
# Needs openssl, kubectl and kvtier. The token of the first client of the gateway is shown on the terminal, and only there.
set -eu
umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

secret() {
  name=$1
  shift
  echo "---"
  kubectl create secret generic "$name" --namespace "${NAMESPACE:-kvtier}" --dry-run=client --output yaml "$@"
}

# Who looks at the status page.
openssl rand -hex 32 | tr -d '\n' >"$folder/token"
secret kvtier-status --from-file="$folder/token"

# Hosts at the index, with the commands that they use and no others; and its servers among themselves, where there are
# several (component redis-sentinel).
openssl rand -hex 32 | tr -d '\n' >"$folder/password"
openssl rand -hex 32 | tr -d '\n' >"$folder/internal"
host="on #$(sha256sum "$folder/password" | cut -d ' ' -f 1) -@all"
server="on #$(sha256sum "$folder/internal" | cut -d ' ' -f 1) -@all"
cat >"$folder/users.acl" <<ACL
user default off
user kvtier $host ~* +ping +select +get +mget +set +del +hget +hset +hdel +hgetall +time +scan +eval +evalsha +script|load
user replica $server +ping +psync +replconf
user sentinel $server allchannels +ping +info +role +multi +exec +slaveof +config|rewrite +client|setname +client|kill +script|kill +publish +subscribe
ACL
cat >"$folder/sentinel.acl" <<ACL
user default off
user kvtier $host +ping +sentinel|masters
user sentinel $server allchannels +ping +info +client|setname +publish +subscribe +sentinel|is-master-down-by-addr +sentinel|get-master-addr-by-name
ACL
secret kvtier-redis --from-file="$folder/password" --from-file="$folder/internal" --from-file="$folder/users.acl" \
  --from-file="$folder/sentinel.acl"

# The authority that signs the certificate of each pod (component tls).
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj /CN=kvtier-ca \
  -addext keyUsage=critical,keyCertSign,cRLSign -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
secret kvtier-ca --from-file="$folder/ca.crt" --from-file="$folder/ca.key"

# Clients at the gateway (component tls).
printf '[remote]\ntokens_file = "%s"\n' "$folder/tokens.json" >"$folder/kvtier.toml"
token=$(kvtier token add first --config "$folder/kvtier.toml")
secret kvtier-tokens --from-file="$folder/tokens.json"
echo "token of the client 'first' at the gateway: $token" >&2

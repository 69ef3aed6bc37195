#!/bin/sh
# A key, and a certificate of this pod's address and of the names by which it is called; signed by the authority.
# sh certificate.sh FOLDER-OF-THE-AUTHORITY FOLDER
set -eu
umask 077
ca=$1 out=$2
head="kvtier-head-svc.$NAMESPACE.svc" gateway="kvtier-gateway.$NAMESPACE.svc"
names="IP:$POD_IP,IP:127.0.0.1,DNS:localhost"
names="$names,DNS:kvtier-head-svc,DNS:$head,DNS:$head.cluster.local"
names="$names,DNS:kvtier-gateway,DNS:$gateway,DNS:$gateway.cluster.local"
export RANDFILE="$out/.rnd"
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=kvtier" \
  -keyout "$out/tls.key" -out "$out/request" 2>/dev/null
printf 'subjectAltName=%s\nbasicConstraints=critical,CA:false\nextendedKeyUsage=serverAuth,clientAuth\n' "$names" \
  >"$out/extensions"
openssl x509 -req -in "$out/request" -CA "$ca/ca.crt" -CAkey "$ca/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
  -days 825 -sha256 -extfile "$out/extensions" -out "$out/tls.crt" 2>/dev/null
cp "$ca/ca.crt" "$out/ca.crt"
rm -f "$out/request" "$out/extensions" "$out/.rnd"

#!/bin/bash
# OpenStack Swift of one node with its s3api on loopback: an S3 server that refuses conditional
# writes (501 NotImplemented).
#
#   swift.sh install
#   swift.sh up
#   swift.sh env       endpoint and keys, NAME=VALUE a line
#   swift.sh down
#
# Environment: LAB, PORT. The servers share a PID and mount namespace: ending its first process ends
# them all; and swift.conf, which is read from /etc/swift only, is bound there for them alone.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/swift}
PORT=${PORT:-8090}
BASE=${BASE:-6210}
ACCESS=test:tester
SECRET=testing
# shellcheck source=packages.sh
. "$HERE/packages.sh"
# shellcheck source=processes.sh
. "$HERE/processes.sh"

install() {
  install_packages swift-proxy swift-account swift-container swift-object python3-swift memcached curl
}

write_storage_configuration() { # KIND PORT   ring and server of objects, containers or accounts
  swift-ring-builder "$LAB/etc/$1.builder" create 6 1 0 >/dev/null
  swift-ring-builder "$LAB/etc/$1.builder" add "r1z1-127.0.0.1:$2/d1" 1 >/dev/null
  swift-ring-builder "$LAB/etc/$1.builder" rebalance >/dev/null
  cat >"$LAB/etc/$1.conf" <<C
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $2
devices = $LAB/srv
mount_check = false
fallocate_reserve = 0
swift_dir = $LAB/etc
user = root
workers = 1
log_level = WARNING
[pipeline:main]
pipeline = $1-server
[app:$1-server]
use = egg:swift#$1
C
}

write_proxy_configuration() {
  cat >"$LAB/etc/swift.conf" <<C
[swift-hash]
swift_hash_path_suffix = lab
swift_hash_path_prefix = lab
[storage-policy:0]
name = Policy-0
default = yes
C
  cat >"$LAB/etc/proxy.conf" <<C
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $PORT
swift_dir = $LAB/etc
user = root
workers = 2
log_level = WARNING
[pipeline:main]
pipeline = catch_errors proxy-logging cache listing_formats bulk s3api tempauth copy slo dlo versioned_writes symlink proxy-logging proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:proxy-logging]
use = egg:swift#proxy_logging
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:$((BASE + 9))
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
check_bucket_owner = false
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:symlink]
use = egg:swift#symlink
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_versioned_writes = true
allow_object_versioning = true
C
}

up() {
  [ ! -e "$LAB/run" ] || { echo "already there: $LAB" >&2; exit 1; }
  mkdir -p "$LAB"/{srv/d1,run,log,etc}
  export SWIFT_DIR=$LAB/etc
  write_storage_configuration object $BASE
  write_storage_configuration container $((BASE + 1))
  write_storage_configuration account $((BASE + 2))
  write_proxy_configuration
  mkdir -p /etc/swift
  cat >"$LAB/servers.sh" <<R
mount --bind $LAB/etc /etc/swift
memcached -u root -l 127.0.0.1 -p $((BASE + 9)) -m 64 &
swift-account-server $LAB/etc/account.conf &
swift-container-server $LAB/etc/container.conf &
swift-object-server $LAB/etc/object.conf &
swift-proxy-server $LAB/etc/proxy.conf &
wait
R
  start_process servers unshare --mount --pid --fork --kill-child --mount-proc bash "$LAB/servers.sh"
  wait_until 40 curl -s -o /dev/null "http://127.0.0.1:$PORT/"
}

case ${1:-} in
  install) install ;;
  up) up ;;
  env) printf '%s\n' "endpoint_url=http://127.0.0.1:$PORT" "key=$ACCESS" "secret=$SECRET" ;;
  down) kill_process servers; wait_until 10 rm -rf "$LAB" ;;
  *) sed -n '2,12p' "$0"; exit 2 ;;
esac

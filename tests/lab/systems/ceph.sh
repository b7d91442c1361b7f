#!/bin/bash
# A Ceph cluster of one node on loopback: a monitor, an OSD (bluestore on a sparse file), and what
# is asked for: rgw (the S3 gateway), fs (an MDS and two ceph-fuse mounts), mgr (statvfs needs it).
#
#   ceph.sh install
#   ceph.sh up rgw [fs] [mgr]      a new, empty cluster with these parts
#   ceph.sh env                    endpoint and keys, NAME=VALUE a line
#   ceph.sh collect                let the gateway delete at once what it would in some hours
#   ceph.sh kill9 PART             PART: mon osd rgw mds mgr fuse1 fuse2
#   ceph.sh start PART             start it again after kill9
#   ceph.sh down                   end everything that `up` and `start` started, and remove $LAB
#
# Environment: LAB (the folder of this cluster; must be absolute), RGW_PORT, MON_PORT, OSD_GB.
# Mounts of fs: $LAB/mnt1 and $LAB/mnt2.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/ceph}
RGW_PORT=${RGW_PORT:-7480}
MON_PORT=${MON_PORT:-6789}
OSD_GB=${OSD_GB:-20}
ADDRESS=127.0.0.1
ACCESS=labaccess
SECRET=labsecretlabsecret
CONF=$LAB/ceph.conf
PARTS="fuse1 fuse2 rgw mds mgr osd mon"
export CEPH_CONF=$CONF CEPH_ARGS=""
# shellcheck source=packages.sh
. "$HERE/packages.sh"
# shellcheck source=processes.sh
. "$HERE/processes.sh"

install() {
  install_packages ceph-mon ceph-osd ceph-common radosgw ceph-mds ceph-fuse ceph-mgr curl
}

# A command of a client that has not learnt the cluster's fsid yet is refused with EPERM before the
# monitor has looked at it (one in ten to sixty): such a one is given again, and nothing else is.
admin() {
  local tries
  for tries in $(seq 20); do
    timeout 60 ceph -c "$CONF" "$@" 2>"$LAB/log/admin.err" && return
    grep -q 'EPERM: problem getting command descriptions' "$LAB/log/admin.err" || break
  done
  cat "$LAB/log/admin.err" >&2
  return 1
}

gateway_admin() {
  timeout 60 radosgw-admin -c "$CONF" "$@" >>"$LAB/log/radosgw-admin.out" 2>&1
}

start() {
  case $1 in
    mon) start_process mon ceph-mon -f -c "$CONF" -i a --public-addr "$ADDRESS:$MON_PORT" ;;
    mgr) start_process mgr ceph-mgr -f -c "$CONF" -i x ;;
    osd) start_process osd ceph-osd -f -c "$CONF" -i 0 ;;
    rgw) start_process rgw radosgw -f -c "$CONF" -n client.rgw ;;
    mds) start_process mds ceph-mds -f -c "$CONF" -i m ;;
    fuse1) start_process fuse1 ceph-fuse -f -c "$CONF" -n client.admin "$LAB/mnt1" ;;
    fuse2) start_process fuse2 ceph-fuse -f -c "$CONF" -n client.admin "$LAB/mnt2" ;;
    *) echo "no such part: $1" >&2; exit 2 ;;
  esac
}

write_configuration() { # FSID
  cat >"$CONF" <<C
[global]
fsid = $1
# Without a map to begin with, a daemon (auth is none) can send its first command before it has
# learnt the fsid: 'wrong fsid', and the OSD exits, in one start of about five.
monmap = $LAB/monmap
mon host = v1:$ADDRESS:$MON_PORT
ms bind msgr2 = false
public addr = $ADDRESS
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = false
run dir = $LAB/run
admin socket = $LAB/run/\$name.\$pid.asok
log file = $LAB/log/\$name.log
debug default = 0
# one OSD, one copy, few placement groups
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
osd crush chooseleaf type = 0
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
mon max pg per osd = 2000
# start faster
paxos propose interval = 0.02
mon tick interval = 1
mon data avail warn = 1
mon data avail crit = 1
mon osd initial require min compat client = luminous
[mon.a]
host = $(hostname)
mon data = $LAB/mon
[mgr.x]
mgr data = $LAB/mgr
[osd.0]
osd data = $LAB/osd
osd objectstore = bluestore
bluestore block size = $((OSD_GB << 30))
bluestore block create = true
bluestore fsck on mount = false
osd memory target = 1073741824
# else the creation of a bucket hangs for up to 30 s after a kill -9 of the gateway
osd client watch timeout = 4
osd class load list = *
osd class default list = *
[client.rgw]
rgw data = $LAB/rgw
rgw frontends = beast endpoint=$ADDRESS:$RGW_PORT
rgw thread pool size = 64
rgw enable usage log = false
rgw crypt require ssl = false
rgw run sync thread = false
[mds.m]
mds data = $LAB/mds
# Ceph's own 5 (s) is how long a rename can take when another client has the name cached
mds tick interval = 0.1
[client]
fuse default permissions = false
client die on failed remount = false
C
}

start_store() {
  local fsid uuid
  fsid=$(cat /proc/sys/kernel/random/uuid)
  write_configuration "$fsid"
  monmaptool --create --clobber --fsid "$fsid" --addv a "[v1:$ADDRESS:$MON_PORT]" "$LAB/monmap" \
    >"$LAB/log/monmaptool.out"
  ceph-mon -c "$CONF" --mkfs -i a --monmap "$LAB/monmap" >"$LAB/log/mon-mkfs.out" 2>&1
  start mon
  wait_until 20 admin mon stat
  uuid=$(cat /proc/sys/kernel/random/uuid)
  admin osd new "$uuid" >/dev/null
  ceph-osd -c "$CONF" -i 0 --mkfs --osd-uuid "$uuid" >"$LAB/log/osd-mkfs.out" 2>&1
  start osd
  wait_until 40 osd_is_up
}

osd_is_up() {
  running osd || start osd
  admin osd stat | grep -q '1 up'
}

start_gateway() {
  # the first call makes the default zone as well
  gateway_admin user create --uid=lab --display-name=lab --access-key="$ACCESS" --secret="$SECRET"
  # a second storage class, in a pool of its own
  local class=(--placement-id default-placement --storage-class STANDARD_IA)
  gateway_admin zonegroup placement add --rgw-zonegroup default "${class[@]}"
  gateway_admin zone placement add --rgw-zone default "${class[@]}" --data-pool default.rgw.ia.data
  start rgw
  wait_until 60 curl -sf -o /dev/null "http://$ADDRESS:$RGW_PORT/"
}

mds_is_active() {
  admin mds stat | grep -q up:active
}

start_filesystem() {
  {
    admin osd pool create fsmeta 4
    admin osd pool create fsdata 8
    admin fs new lab fsmeta fsdata
  } >"$LAB/log/fs-new.out" 2>&1
  start mds
  wait_until 30 mds_is_active
  start fuse1
  start fuse2
  wait_until 30 mountpoint -q "$LAB/mnt1"
  wait_until 30 mountpoint -q "$LAB/mnt2"
}

up() {
  [ ! -e "$LAB/run" ] || { echo "already there: $LAB" >&2; exit 1; }
  mkdir -p "$LAB"/{run,log,mon,mgr,osd,rgw,mds,mnt1,mnt2}
  start_store
  local part
  for part in "$@"; do
    case $part in
      rgw) start_gateway ;;
      fs) start_filesystem ;;
      mgr) start mgr ;;
      *) echo "no such part: $part" >&2; exit 2 ;;
    esac
  done
}

down() {
  unmount "$LAB/mnt1" "$LAB/mnt2"
  # shellcheck disable=SC2086
  kill_process $PARTS
  rm -rf "$LAB"
}

case ${1:-} in
  install) install ;;
  up) shift; up "${@:-rgw}" ;;
  env) printf '%s\n' "endpoint_url=http://$ADDRESS:$RGW_PORT" "key=$ACCESS" "secret=$SECRET" ;;
  collect) gateway_admin gc process --include-all ;;
  kill9) kill_process "$2" ;;
  start) start "$2" ;;
  down) down ;;
  *) sed -n '2,16p' "$0"; exit 2 ;;
esac

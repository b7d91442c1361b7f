#!/bin/bash
# MooseFS: a master, two chunkservers and two FUSE mounts on this machine.
#
#   moosefs.sh install
#   moosefs.sh up
#   moosefs.sh down
#
# Environment: LAB. Mounts: $LAB/mnt1 and $LAB/mnt2. MooseFS refuses 127.x, so its address lies on
# the loopback device of a network namespace of its own, which has no way out.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/moosefs}
ADDRESS=10.80.0.1
PORT=9519
# shellcheck source=packages.sh
. "$HERE/packages.sh"
# shellcheck source=processes.sh
. "$HERE/processes.sh"
NAMESPACE=ckl-$(lab_token)

install() {
  install_packages moosefs-master moosefs-chunkserver moosefs-client
}

start() { # NAME COMMAND...
  local name=$1
  shift
  start_process "$name" nsenter --net="/run/netns/$NAMESPACE" "$@"
}

write_master_configuration() {
  cp /var/lib/mfs/metadata.mfs.empty "$LAB/master/metadata.mfs"
  printf '* / rw,alldirs,admin,maproot=0:0\n* . rw\n' >"$LAB/exports.cfg"
  : >"$LAB/topology.cfg"
  cat >"$LAB/master.cfg" <<C
WORKING_USER=root
WORKING_GROUP=root
DATA_PATH=$LAB/master
EXPORTS_FILENAME=$LAB/exports.cfg
TOPOLOGY_FILENAME=$LAB/topology.cfg
MATOML_LISTEN_HOST=$ADDRESS
MATOML_LISTEN_PORT=$PORT
MATOCS_LISTEN_HOST=$ADDRESS
MATOCS_LISTEN_PORT=$((PORT + 1))
MATOCL_LISTEN_HOST=$ADDRESS
MATOCL_LISTEN_PORT=$((PORT + 2))
MATOCS_TIMEOUT=10
REPLICATIONS_DELAY_INIT=5
C
}

write_chunkserver_configuration() { # N
  echo "$LAB/chunk$1/disk" >"$LAB/chunk$1/disks.cfg"
  cat >"$LAB/chunk$1.cfg" <<C
WORKING_USER=root
WORKING_GROUP=root
DATA_PATH=$LAB/chunk$1
HDD_CONF_FILENAME=$LAB/chunk$1/disks.cfg
HDD_LEAVE_SPACE_DEFAULT=64MiB
MASTER_HOST=$ADDRESS
MASTER_PORT=$((PORT + 1))
CSSERV_LISTEN_HOST=$ADDRESS
CSSERV_LISTEN_PORT=$((PORT + 9 + $1))
MASTER_RECONNECTION_DELAY=1
C
}

mounted() { # N   start it again if the master was not ready for it yet
  running "mnt$1" || start "mnt$1" mfsmount -f -H $ADDRESS -P $((PORT + 2)) "$LAB/mnt$1"
  mountpoint -q "$LAB/mnt$1"
}

serves_both() { # a file through one mount is there through the other: the chunkservers take part
  echo ready >"$LAB/mnt1/.ready" && [ "$(cat "$LAB/mnt2/.ready")" = ready ]
}

up() {
  [ ! -e "$LAB/run" ] || { echo "already there: $LAB" >&2; exit 1; }
  mkdir -p "$LAB"/{run,log,master,chunk1/disk,chunk2/disk,mnt1,mnt2}
  ip netns add "$NAMESPACE"
  ip -n "$NAMESPACE" link set lo up
  ip -n "$NAMESPACE" addr add $ADDRESS/32 dev lo
  write_master_configuration
  start master mfsmaster -f -c "$LAB/master.cfg" start
  local n
  for n in 1 2; do
    write_chunkserver_configuration $n
    start chunk$n mfschunkserver -f -c "$LAB/chunk$n.cfg" start
  done
  for n in 1 2; do wait_until 30 mounted $n; done
  wait_until 30 serves_both
  rm "$LAB/mnt1/.ready"
}

down() {
  unmount "$LAB/mnt1" "$LAB/mnt2"
  kill_process mnt1 mnt2 chunk1 chunk2 master
  ip netns del "$NAMESPACE" 2>/dev/null || true
  wait_until 10 rm -rf "$LAB"
}

case ${1:-} in
  install) install ;;
  up) up ;;
  down) down ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac

#!/bin/bash
# A GlusterFS volume of several bricks on this machine, mounted twice through FUSE.
#
#   gluster.sh install
#   gluster.sh up replica|disperse   replica: 3 bricks, 3 copies; disperse: 6 bricks, 4+2 coded
#   gluster.sh kill-brick N          kill -9 of one brick's process
#   gluster.sh start-bricks          start those that were killed
#   gluster.sh down                  end everything, remove $LAB
#
# Environment: LAB. Mounts: $LAB/mnt1 and $LAB/mnt2, two clients with caches of their own.
# The daemons share a PID, mount and network namespace: ending its first process ends them all, and
# /var/lib/glusterd stays clean. Gluster refuses 127.x, so the address lies on that network
# namespace's loopback device, which has no way out.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/gluster}
VOLUME=lab
ADDRESS=10.77.0.1
# shellcheck source=packages.sh
. "$HERE/packages.sh"
# shellcheck source=processes.sh
. "$HERE/processes.sh"

install() {
  install_packages glusterfs-server glusterfs-client attr
}

inside() {
  nsenter --target "$(cat "$LAB/run/init.pid")" --mount --pid --net "$@"
}

volume() {
  inside gluster --mode=script volume "$@" >>"$LAB/log/cli.out" 2>&1
}

start_namespace() {
  mkdir -p /var/lib/glusterd /var/log/glusterfs /run/gluster
  cat >"$LAB/init.sh" <<R
mount --make-rprivate /var
mount --make-rprivate /run 2>/dev/null || true
mount --bind $LAB/var /var/lib/glusterd
mount --bind $LAB/log /var/log/glusterfs
mount --bind $LAB/sockets /run/gluster
ip link set lo up
ip addr add $ADDRESS/32 dev lo
touch $LAB/run/ready
# process 1 must reap: glusterd takes a zombie for a brick that runs
trap : CHLD
while :; do sleep 3600 & wait; done
R
  start_process outer unshare --mount --net --propagation unchanged --pid --fork --kill-child \
    --mount-proc bash -c "mount --make-private /var; exec bash $LAB/init.sh"
  wait_until 10 test -e "$LAB/run/ready"
  pgrep -P "$(pid_of outer)" >"$LAB/run/init.pid"
}

up() {
  local bricks="" layout count n
  case $1 in
    replica) count=3 layout="replica 3" ;;
    disperse) count=6 layout="disperse-data 4 redundancy 2" ;;
    *) echo "replica or disperse?" >&2; exit 2 ;;
  esac
  [ ! -e "$LAB/run" ] || { echo "already there: $LAB" >&2; exit 1; }
  mkdir -p "$LAB"/{run,log,var,sockets,mnt1,mnt2}
  start_namespace
  inside glusterd --log-level WARNING
  wait_until 20 inside gluster --mode=script pool list
  for n in $(seq $count); do
    mkdir -p "$LAB/brick$n"
    bricks="$bricks $ADDRESS:$LAB/brick$n"
  done
  # shellcheck disable=SC2086
  volume create $VOLUME $layout transport tcp $bricks force
  volume set $VOLUME network.ping-timeout 5
  volume set $VOLUME storage.fips-mode-rchecksum on
  volume start $VOLUME
  for n in 1 2; do
    start_process "mnt$n" nsenter --target "$(cat "$LAB/run/init.pid")" --net \
      glusterfs --no-daemon --log-file="$LAB/log/mnt$n.log" \
      --volfile-server=$ADDRESS --volfile-id=$VOLUME "$LAB/mnt$n"
  done
  for n in 1 2; do
    wait_until 20 mountpoint -q "$LAB/mnt$n"
    wait_until 20 stat "$LAB/mnt$n"
  done
}

down() {
  unmount "$LAB/mnt1" "$LAB/mnt2"
  kill_process mnt1 mnt2 outer
  wait_until 10 rm -rf "$LAB"
}

case ${1:-} in
  install) install ;;
  up) up "${2:-replica}" ;;
  kill-brick) inside sh -c "kill -9 \$(pgrep -f '^/usr/sbin/glusterfsd .*brick$2 ')" ;;
  start-bricks) volume start $VOLUME force ;;
  down) down ;;
  *) sed -n '2,14p' "$0"; exit 2 ;;
esac

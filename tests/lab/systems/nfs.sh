#!/bin/bash
# A real NFS server (Linux knfsd) and two real clients (Linux nfs), each in its own guest: see uml.sh.
#
#   nfs.sh install
#   nfs.sh up [VERSION [OPTIONS]]   VERSION: 4.2, 4.1, 4.0 or 3; clients c1 and c2 mount at /mnt/a
#   nfs.sh exec c1 COMMAND...       inside a client
#   nfs.sh attach c1 COMMAND...     the same with this standard input
#   nfs.sh cut-server               power cut of the server; its disk is kept
#   nfs.sh start-server             boot it again
#   nfs.sh down
#
# Environment: LAB, PYTHON, FS=ext4|xfs (the server's disk), DISK_MB, SYNC=sync|async (the export),
# CLIENT_MEMORY, GRACE_S (how long a reborn server waits for its clients; also the lease).
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
export LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/nfs}
FS=${FS:-ext4}
DISK_MB=${DISK_MB:-4096}
SYNC=${SYNC:-sync}
CLIENT_MEMORY=${CLIENT_MEMORY:-1024M}
GRACE_S=${GRACE_S:-10}
SERVER=10.78.0.2
# shellcheck source=packages.sh
. "$HERE/packages.sh"

uml() {
  "$HERE/uml.sh" "$@"
}

install() {
  uml install
  install_packages nfs-common nfs-kernel-server rpcbind
}

boot_server() {
  uml up s $SERVER 1024M "$LAB/disk"
}

serve() { # FRESH
  uml exec s bash /mnt/share/guest_nfs_server.sh "$LAB/modules" "$SYNC" "$GRACE_S" "$1"
}

up() {
  local version=${1:-4.2} options=${2:-} n
  [ ! -e "$LAB/run" ] || { echo "already there: $LAB" >&2; exit 1; }
  uml prepare
  truncate -s "${DISK_MB}M" "$LAB/disk"
  case $FS in
    ext4) mkfs.ext4 -q -F "$LAB/disk" ;;
    xfs) mkfs.xfs -q -f "$LAB/disk" ;;
    *) echo "FS=ext4 or FS=xfs" >&2; exit 2 ;;
  esac
  in_parallel boot_server "uml up c1 10.78.0.11 $CLIENT_MEMORY" "uml up c2 10.78.0.12 $CLIENT_MEMORY"
  serve yes
  for n in 1 2; do
    mount_client "c$n" "$version" "$options"
  done
}

mount_client() {
  uml exec "$1" bash /mnt/share/guest_nfs_client.sh "$LAB/modules" $SERVER "$2" "$3"
}

in_parallel() { # each argument is a command; fails if one of them does
  local command pids=() pid status=0
  for command in "$@"; do
    $command &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return $status
}

case ${1:-} in
  install) install ;;
  up) shift; up "$@" ;;
  exec | attach) exec "$HERE/uml.sh" "$@" ;;
  cut-server) uml kill9 s ;;
  start-server) boot_server; serve no ;;
  down) uml down ;;
  *) sed -n '2,14p' "$0"; exit 2 ;;
esac

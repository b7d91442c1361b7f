#!/bin/bash
# A disk of its own for the power-cut tests: a sparse file, a file system, a loop mount at $LAB/mnt.
#
#   loop_disk.sh install
#   loop_disk.sh up ext4|ext4-1k|xfs|btrfs MB
#   loop_disk.sh cut       the power goes off: the file system stops at once and writes nothing more,
#                          its journal included (the shutdown ioctl of xfs and ext4)
#   loop_disk.sh remount   unmount and mount again: what the journal holds is recovered
#   loop_disk.sh down
#
# Environment: LAB.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/loopdisk}
# shellcheck source=packages.sh
. "$HERE/packages.sh"
# shellcheck source=processes.sh
. "$HERE/processes.sh"

install() {
  install_packages btrfs-progs e2fsprogs util-linux xfsprogs
}

up() {
  [ ! -e "$LAB" ] || { echo "already there: $LAB" >&2; exit 1; }
  mkdir -p "$LAB/mnt" "$LAB/log"
  truncate -s "$2M" "$LAB/disk"
  case $1 in
    btrfs) mkfs.btrfs -q -f "$LAB/disk" ;;
    ext4) mkfs.ext4 -q -F "$LAB/disk" ;;
    ext4-1k) mkfs.ext4 -q -F -b 1024 "$LAB/disk" ;;
    xfs) mkfs.xfs -q -f "$LAB/disk" ;;
    *) echo "which file system?" >&2; exit 2 ;;
  esac
  # One loop device for the whole time: `mount -o loop` would give it back and take it again, and
  # meanwhile find the old one, which is about to vanish.
  losetup --find --show "$LAB/disk" >"$LAB/device"
  mount "$(cat "$LAB/device")" "$LAB/mnt"
}

down() {
  unmount "$LAB/mnt"
  [ ! -s "$LAB/device" ] || losetup --detach "$(cat "$LAB/device")" || true
  rm -rf "$LAB"
}

case ${1:-} in
  install) install ;;
  up) up "$2" "$3" ;;
  cut) xfs_io -x -c shutdown "$LAB/mnt" ;;
  remount)
    wait_until 10 umount "$LAB/mnt"
    mount "$(cat "$LAB/device")" "$LAB/mnt" ;;
  down) down ;;
  *) sed -n '2,11p' "$0"; exit 2 ;;
esac

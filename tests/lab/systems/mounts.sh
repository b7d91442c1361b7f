#!/bin/bash
# Mounts of one kind each, below $LAB: mnt1, and mnt2 where two mounts share one place.
#
#   mounts.sh install
#   mounts.sh kinds        the kinds, one a line
#   mounts.sh up KIND
#   mounts.sh freeze       make what was written read-only (squashfs)
#   mounts.sh down
#
# Environment: LAB, PYTHON, PORT (of sshd or of the S3 server).
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/mounts}
PORT=${PORT:-8099}
# shellcheck source=packages.sh
. "$HERE/packages.sh"
# shellcheck source=processes.sh
. "$HERE/processes.sh"

install() {
  install_packages bindfs btrfs-progs curl e2fsprogs encfs exfat-fuse exfatprogs fuse3 gocryptfs \
    mergerfs ntfs-3g openssh-client openssh-server rclone s3fs squashfs-tools sshfs unionfs-fuse util-linux
}

image() { # MB   a sparse file on a loop device
  truncate -s "$1M" "$LAB/disk"
  losetup --find --show "$LAB/disk" >"$LAB/device"
}

on_device() { # a kernel's or a FUSE file system with blocks
  local device
  image 320
  device=$(cat "$LAB/device")
  case $1 in
    btrfs) mkfs.btrfs -q -f "$device" && mount "$device" "$LAB/mnt1" ;;
    exfat-fuse) mkfs.exfat "$device" >/dev/null && mount.exfat-fuse "$device" "$LAB/mnt1" >/dev/null ;;
    ntfs-3g) mkfs.ntfs -q -f "$device" >/dev/null 2>&1 && ntfs-3g "$device" "$LAB/mnt1" ;;
  esac
}

encrypted() {
  case $1 in
    gocryptfs)
      gocryptfs -q -init -extpass "echo lab" "$LAB/a" && gocryptfs -q -extpass "echo lab" "$LAB/a" "$LAB/mnt1" ;;
    encfs) encfs --standard --extpass="echo lab" "$LAB/a" "$LAB/mnt1" ;;
  esac
}

over_ssh() {
  ssh-keygen -q -t ed25519 -N '' -f "$LAB/host"
  ssh-keygen -q -t ed25519 -N '' -f "$LAB/user"
  cp "$LAB/user.pub" "$LAB/keys"
  mkdir -p /run/sshd
  cat >"$LAB/sshd.conf" <<C
ListenAddress 127.0.0.1
Port $PORT
HostKey $LAB/host
AuthorizedKeysFile $LAB/keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
Subsystem sftp internal-sftp
PidFile none
C
  start_process sshd /usr/sbin/sshd -D -e -f "$LAB/sshd.conf"
  wait_until 10 bash -c "exec 3<>/dev/tcp/127.0.0.1/$PORT"
  local mount cache
  # The first keeps listings for 20 s, as by default, the second none.
  for mount in mnt1 mnt2; do
    cache=$([ $mount = mnt1 ] && echo yes || echo no)
    sshfs -o dir_cache="$cache" -p "$PORT" -o IdentityFile="$LAB/user",StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null \
      "root@127.0.0.1:$LAB/a" "$LAB/$mount" 2>/dev/null
  done
}

of_bucket() {
  export AWS_ACCESS_KEY_ID=lab AWS_SECRET_ACCESS_KEY=lab
  start_process moto "$PYTHON" "$HERE/../../kits/atomic_moto.py" "$PORT"
  wait_until 60 curl -sf -X PUT "http://127.0.0.1:$PORT/bucket"
  case $1 in
    s3fs)
      s3fs bucket "$LAB/mnt1" -o url="http://127.0.0.1:$PORT",use_path_request_style,sigv4,enable_noobj_cache ;;
    rclone)
      env -u AWS_CA_BUNDLE rclone --config /dev/null mount ":s3,provider=Other,env_auth=true,endpoint='http://127.0.0.1:$PORT':bucket" \
        "$LAB/mnt1" --vfs-cache-mode writes --cache-dir "$LAB/a" --vfs-write-back 0s --daemon ;;
  esac
}

layered() {
  case $1 in
    bindfs) bindfs "$LAB/a" "$LAB/mnt1" ;;
    mergerfs) mergerfs -o category.create=mfs "$LAB/a:$LAB/b" "$LAB/mnt1" ;;
    unionfs-fuse) unionfs -o cow "$LAB/a=RW:$LAB/b=RO" "$LAB/mnt1" ;;
    overlayfs) mount -t overlay overlay -o "lowerdir=$LAB/b,upperdir=$LAB/a,workdir=$LAB/work" "$LAB/mnt1" ;;
    tmpfs | squashfs) mount -t tmpfs -o size=64m tmpfs "$LAB/mnt1" ;;
  esac
}

up() {
  [ ! -e "$LAB" ] || { echo "already there: $LAB" >&2; exit 1; }
  mkdir -p "$LAB"/{mnt1,mnt2,log,run,a,b,work}
  case $1 in
    btrfs | exfat-fuse | ntfs-3g) on_device "$1" ;;
    encfs | gocryptfs) encrypted "$1" ;;
    sshfs) over_ssh ;;
    s3fs | rclone) of_bucket "$1" ;;
    *) layered "$1" ;;
  esac
  wait_until 10 mountpoint -q "$LAB/mnt1"
}

freeze() {
  mksquashfs "$LAB/mnt1" "$LAB/disk" -quiet -no-progress >/dev/null
  umount "$LAB/mnt1"
  mount -o loop,ro "$LAB/disk" "$LAB/mnt1"
}

down() {
  unmount "$LAB/mnt1" "$LAB/mnt2"
  kill_process sshd moto
  [ ! -s "$LAB/device" ] || losetup --detach "$(cat "$LAB/device")" || true
  rm -rf "$LAB"
}

case ${1:-} in
  install) install ;;
  kinds)
    printf '%s\n' bindfs btrfs encfs exfat-fuse gocryptfs mergerfs ntfs-3g overlayfs rclone s3fs \
      squashfs sshfs tmpfs unionfs-fuse ;;
  up) up "$2" ;;
  freeze) freeze ;;
  down) down ;;
  *) sed -n '2,11p' "$0"; exit 2 ;;
esac

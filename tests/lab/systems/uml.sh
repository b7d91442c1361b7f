#!/bin/bash
# Small real Linux hosts without virtual machines: user-mode-linux, a Linux 6.1 that runs as an
# ordinary process (nfs, nfsd, dm-log-writes as modules; ext4, xfs built in). Each guest sees this
# machine's / read-only, so the project's Python runs inside as it is, and $LAB/share at /mnt/share
# read-write. All guests of one $LAB share a network namespace that has no way out.
#
#   uml.sh install
#   uml.sh up NAME ADDRESS MEMORY [DISK...]   boot; disks are /dev/ubda, /dev/ubdb ...; returns when
#                                             its agent answers (about 3 s)
#   uml.sh exec NAME COMMAND...     run a command inside: its output and its exit status
#   uml.sh attach NAME COMMAND...   the same, with this standard input passed on
#   uml.sh kill9 NAME               power cut: memory and page cache are gone, the disk file stays
#   uml.sh down
#
# Environment: LAB, PYTHON (3.11 or newer, seen inside at the same path).
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
export LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/uml}
PYTHON=${PYTHON:-/usr/bin/python3}
PORT=7070
# shellcheck source=packages.sh
. "$HERE/packages.sh"
# shellcheck source=processes.sh
. "$HERE/processes.sh"
TOKEN=ckl-$(lab_token)

install() {
  install_packages user-mode-linux kmod iproute2 e2fsprogs xfsprogs dmsetup util-linux
}

prepare() {
  [ ! -e "$LAB/share" ] || return 0
  local version
  version=$(basename "$(ls -d /usr/lib/uml/modules/* | tail -1)")
  mkdir -p "$LAB"/{run,log,share,modules/lib/modules}
  ln -sfn "/usr/lib/uml/modules/$version" "$LAB/modules/lib/modules/$version"
  cp "$HERE"/guest_* "$LAB/share/"
  chmod +x "$LAB/share/guest_init.sh"
  if [ ! -c /dev/net/tun ]; then
    mkdir -p /dev/net
    mknod /dev/net/tun c 10 200
  fi
  ip netns add "$TOKEN"
  ip -n "$TOKEN" link set lo up
  ip -n "$TOKEN" link add br0 type bridge
  ip -n "$TOKEN" addr add 10.78.0.1/24 dev br0
  ip -n "$TOKEN" link set br0 up
}

# Not `ip netns exec`: that takes a copy of the mount table along, and a file system which is
# unmounted here then lives on in the copy.
inside() {
  nsenter --net="/run/netns/$TOKEN" "$@"
}

memory_folder() { # where guests keep their memory: /dev/shm unless a container gave it little room
  local free_kb
  free_kb=$(df --output=avail /dev/shm 2>/dev/null | tail -1)
  if [ "${free_kb:-0}" -gt 5000000 ]; then echo /dev/shm; else echo "$LAB/run"; fi
}

up() {
  local name=$1 address=$2 memory=$3 disks=() tap
  shift 3
  local disk
  for disk in "$@"; do disks+=("ubd${#disks[@]}=$disk"); done
  tap=t${address##*.}
  if ! ip -n "$TOKEN" link show "$tap" >/dev/null 2>&1; then
    inside ip tuntap add "$tap" mode tap
    ip -n "$TOKEN" link set "$tap" mtu 9000 master br0 up
  fi
  echo "$address" >"$LAB/run/$name.address"
  # gro: without it big transfers hang. A fixed address of the card: else a guest that comes back
  # after a power cut is out of reach until the others' ARP entries expire.
  TMPDIR=$(memory_folder) start_process "$name" nsenter --net="/run/netns/$TOKEN" linux.uml \
    "umid=$TOKEN-$name" "uml_dir=$LAB/run/" "mem=$memory" \
    root=/dev/root rootfstype=hostfs ro "init=$LAB/share/guest_init.sh" \
    con=null con0=null,fd:1 quiet \
    "vec0:transport=tap,ifname=$tap,depth=64,gro=1,mtu=9000,mac=$(printf '52:54:0a:4e:00:%02x' "${address##*.}")" \
    "lab_folder=$LAB" "lab_name=$name" "lab_address=$address" "lab_port=$PORT" \
    "lab_python=$PYTHON" "${disks[@]}"
  command_in 90 "$name" true
}

command_in() { # WAIT_S NAME COMMAND...
  local wait_s=$1 name=$2
  shift 2
  inside "$PYTHON" "$HERE/guest_exec.py" "$(cat "$LAB/run/$name.address")" $PORT \
    "$wait_s" plain "$@"
}

# A guest is several processes of this machine; all bear the name that is unique to it.
pids_of() {
  pgrep -f "^linux.uml umid=$TOKEN-$1 " || true
}

none_of() {
  [ -z "$(pids_of "$1")" ]
}

kill9() {
  local pid
  kill_process "$1"
  for pid in $(pids_of "$1"); do kill -9 "$pid" 2>/dev/null || true; done
  wait_until 10 none_of "$1"
  rm -rf "$LAB/run/$TOKEN-$1"
}

down() {
  local file
  for file in "$LAB"/run/*.pid; do
    [ ! -e "$file" ] || kill9 "$(basename "$file" .pid)"
  done
  ip netns del "$TOKEN" 2>/dev/null || true
  rm -rf "$LAB"
}

case ${1:-} in
  install) install ;;
  prepare) prepare ;;
  up) shift; prepare; up "$@" ;;
  exec) shift; command_in 10 "$@" ;;
  attach)
    # exec: so that who kills this process kills the connection
    shift
    name=$1
    shift
    exec nsenter --net="/run/netns/$TOKEN" "$PYTHON" "$HERE/guest_exec.py" \
      "$(cat "$LAB/run/$name.address")" $PORT 10 attach "$@" ;;
  kill9) kill9 "$2" ;;
  down) down ;;
  *) sed -n '2,17p' "$0"; exit 2 ;;
esac

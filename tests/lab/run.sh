#!/bin/bash
# The storage lab: real storage systems, started, tested and taken down on this machine.
#
#   tests/lab/run.sh [PYTEST ARGUMENT...]     root on Debian 12; about 15 minutes
#
# Environment: PYTHON (default .venv/bin/python), CKPTSTORE_LAB_LONG=1 for the long campaigns.
# What it is and what it shows: docs/reference/storage-lab.md
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}

refuse() {
  echo "storage lab: $1" >&2
  exit 2
}

[ "$(id -u)" = 0 ] || refuse "must be root: it mounts file systems and makes network namespaces"
# shellcheck source=/dev/null
[ "$(. /etc/os-release && echo "$ID ${VERSION_ID:-}")" = "debian 12" ] \
  || refuse "needs Debian 12: it installs that release's packages of Ceph, GlusterFS and others"
[ -x "$PYTHON" ] || PYTHON=$(command -v "$PYTHON") || refuse "no Python at $PYTHON"
"$PYTHON" -c 'import ckptstore, pytest' || refuse "$PYTHON has no ckptstore or no pytest"
PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
case $ROOT/ in
  /mnt/* | /run/* | /var/tmp/* | /dev/*)
    refuse "this checkout lies in $ROOT, which the lab's small hosts cannot see" ;;
esac

# Mounts of the lab's own: a copy of the mount table that somebody else takes meanwhile would keep a
# file system alive that is unmounted here; and with the last process of the lab they all vanish.
if [ "${CKPTSTORE_LAB_MOUNTS:-}" != own ]; then
  CKPTSTORE_LAB_MOUNTS=own exec unshare --mount --propagation slave "$0" "$@"
fi

CKPTSTORE_LAB_FOLDER=$(mktemp -d "${TMPDIR:-/tmp}/ckptstore-lab.XXXXXX")
export CKPTSTORE_LAB=1 CKPTSTORE_LAB_FOLDER PYTHON

# Fixtures take every system down; this is for a pytest that was killed.
cleanup() {
  local folder
  for folder in "$CKPTSTORE_LAB_FOLDER"/*/; do
    [ -d "$folder" ] || continue
    "$HERE/systems/take_down.sh" "${folder%/}" || true
  done
  rm -rf "$CKPTSTORE_LAB_FOLDER" || true
}
trap cleanup EXIT

cd "$ROOT"
if [ $# -gt 0 ]; then arguments=("$@"); else arguments=("$HERE"); fi
if [ "${CKPTSTORE_LAB_LONG:-}" = 1 ]; then
  arguments+=(-o timeout=7200 -o faulthandler_timeout=1800)
fi
# In the background, so that this shell hears a signal at once; a terminal's Ctrl-C reaches pytest
# itself, a TERM is passed on as the same. Either way pytest takes down what runs.
env --default-signal=INT \
  "$PYTHON" -m pytest -m lab --durations=25 -p no:cacheprovider "${arguments[@]}" &
pytest=$!
trap : INT
trap 'kill -INT $pytest 2>/dev/null || true' TERM
status=0
wait $pytest || status=$?
while kill -0 $pytest 2>/dev/null; do # a signal ended the wait
  status=0
  wait $pytest || status=$?
done
exit $status

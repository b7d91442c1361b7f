#!/bin/bash
# take_down.sh FOLDER...   End the system that lives below each folder, as `down` of its own script
# would; the folder is named N-KIND (see labkit/systems.py).
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
for folder in "$@"; do
  kind=$(basename "$folder")
  kind=${kind#*-}
  case $kind in
    linux) script=uml.sh ;;
    loopdisk) script=loop_disk.sh ;;
    *) script=$kind.sh ;;
  esac
  [ ! -x "$HERE/$script" ] || LAB=$folder "$HERE/$script" down
done

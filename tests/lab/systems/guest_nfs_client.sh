#!/bin/bash
# In a client's guest: mount the export at /mnt/a.
#   guest_nfs_client.sh MODULES SERVER VERSION OPTIONS
set -e
modules=$1 server=$2 version=$3 options=$4
modprobe -d "$modules" -a nfs nfsv4 nfsv3
mkdir -p /run/rpcbind
rpcbind -w || true
path=/
if [ "$version" = 3 ]; then
  path=/mnt/d/export
  mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak
  touch /var/lib/nfs/state
  rpc.statd --no-notify || true
fi
mount -t nfs -o "vers=$version,proto=tcp${options:+,$options}" "$server:$path" /mnt/a
mountpoint -q /mnt/a

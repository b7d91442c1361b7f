#!/bin/bash
# In the server's guest: Linux knfsd exports /mnt/d/export, on the disk /dev/ubda.
#   guest_nfs_server.sh MODULES SYNC GRACE_S FRESH   SYNC: sync or async; FRESH: yes if no client
#   can have anything to reclaim, so that the grace period is skipped
set -e
modules=$1 sync=$2 grace_s=$3 fresh=$4
modprobe -d "$modules" nfsd
mkdir -p /mnt/d
mount /dev/ubda /mnt/d
mkdir -p /mnt/d/export /mnt/d/state/v4recovery /mnt/d/state/nfsdcld
chmod 777 /mnt/d/export
mount --bind /mnt/d/state /var/lib/nfs
mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/rpc_pipefs /run/rpcbind
touch /var/lib/nfs/state /var/lib/nfs/etab /var/lib/nfs/rmtab
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs
rpcbind -w || true
rpc.statd --no-notify || true
nfsdcld -s /var/lib/nfs/nfsdcld || true
exportfs -o "rw,no_root_squash,no_subtree_check,fsid=0,$sync" 10.78.0.0/24:/mnt/d/export
rpc.nfsd -G "$grace_s" -L "$grace_s" 8
rpc.mountd 2>/dev/null # it complains that there is no IPv6
sm-notify 2>/dev/null || true
[ "$fresh" != yes ] || echo Y >/proc/fs/nfsd/v4_end_grace || true

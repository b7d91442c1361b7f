#!/bin/bash
# The first process of a guest: file systems, network, agent. Parameters come from the kernel's
# command line as lab_NAME=VALUE.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 TMPDIR=/dev/shm
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
for word in $(cat /proc/cmdline); do
  case $word in lab_*=*) export "${word%%=*}"="${word#*=}" ;; esac
done
# / is the machine's own, read-only; what must be written lies in memory
for folder in /run /mnt /var/lib/nfs /var/tmp; do
  [ -d $folder ] && mount -t tmpfs tmpfs $folder
done
mkdir -p /mnt/share /mnt/a /mnt/b /run/lock
mount -t hostfs none /mnt/share -o "$lab_folder/share"
# The NFS client makes the verifier of an exclusive create from jiffies and a process id; two guests
# booted at one moment must not share both, or both may win. So count the ids up differently.
for _ in $(seq $((${lab_address##*.} % 10 * 50))); do ( : ); done
hostname "$lab_name"
ip link set lo up
ip addr add "$lab_address/24" dev vec0
ip link set vec0 mtu 9000 up
/sbin/modprobe -d "$lab_folder/modules" -a loop dm-mod 2>/dev/null
"$lab_python" "$lab_folder/share/guest_agent.py" "$lab_port" &
while :; do sleep 3600 & wait; done

#!/bin/bash
# In a guest: a file system on dm-log-writes, so that every write to its disk is recorded.
#   guest_record_writes.sh start NAME DISK LOG MODULES   mounted at /mnt/NAME
#   guest_record_writes.sh stop NAME
set -e
export DM_DISABLE_UDEV=1
case $1 in
  start)
    modprobe -d "$5" dm-log-writes
    dmsetup create "$2" --table "0 $(blockdev --getsz "$3") log-writes $3 $4"
    mkdir -p "/mnt/$2"
    mount "/dev/mapper/$2" "/mnt/$2"
    ;;
  stop)
    umount "/mnt/$2"
    dmsetup remove "$2"
    sync
    ;;
esac

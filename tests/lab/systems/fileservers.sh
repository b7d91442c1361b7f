#!/bin/bash
# File servers on loopback that fsspec reaches: OpenSSH's SFTP, Samba, WebDAV (wsgidav), FTP
# (pyftpdlib). All serve the folder $LAB/srv/data. sshd and smbd act as a user of this machine that
# is made for the purpose, so that the rights of files count; the other two have rights of their own.
#
#   fileservers.sh install
#   fileservers.sh up
#   fileservers.sh stop NAME     end one server: sshd, smbd, webdav or ftpd
#   fileservers.sh start NAME
#   fileservers.sh env           user, password and folder, NAME=VALUE a line
#   fileservers.sh down
#
# Environment: LAB, PYTHON (with wsgidav, cheroot and pyftpdlib), SFTP_PORT, SMB_PORT, WEBDAV_PORT,
# FTP_PORT.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
LAB=${LAB:-${TMPDIR:-/tmp}/ckptstore-lab/fileservers}
PYTHON=${PYTHON:-python3}
# shellcheck source=packages.sh
. "$HERE/packages.sh"
# shellcheck source=processes.sh
. "$HERE/processes.sh"
LAB_USER=lab$(lab_token)
PASSWORD=fish+chips

install() {
  install_packages openssh-server samba openssl
}

configure() {
  useradd --no-create-home --home-dir "$LAB/srv" --shell /bin/sh \
    --password "$(openssl passwd -6 "$PASSWORD")" "$LAB_USER"
  mkdir -p "$LAB"/{srv/data,run,log,etc,samba}
  chmod go+x "$LAB/.." "$LAB" "$LAB/srv" # the user reaches its folder through them
  chown "$LAB_USER" "$LAB/srv/data"
  ssh-keygen -q -t ed25519 -N '' -f "$LAB/etc/host_key"
  cat >"$LAB/etc/sshd.conf" <<C
ListenAddress 127.0.0.1
Port $SFTP_PORT
HostKey $LAB/etc/host_key
PidFile none
UsePAM no
PasswordAuthentication yes
KbdInteractiveAuthentication no
AllowUsers $LAB_USER
Subsystem sftp internal-sftp
MaxStartups 100
C
  cat >"$LAB/etc/smb.conf" <<C
[global]
server role = standalone server
workgroup = LAB
interfaces = 127.0.0.1
bind interfaces only = yes
smb ports = $SMB_PORT
disable netbios = yes
passdb backend = tdbsam:$LAB/samba/passdb.tdb
private dir = $LAB/samba
lock directory = $LAB/samba
state directory = $LAB/samba
cache directory = $LAB/samba
pid directory = $LAB/samba
ncalrpc dir = $LAB/samba/ncalrpc
log file = $LAB/log/smbd.log
load printers = no
printcap name = /dev/null
[data]
path = $LAB/srv/data
read only = no
[reading]
path = $LAB/srv/data
read only = yes
C
  printf '%s\n%s\n' "$PASSWORD" "$PASSWORD" \
    | pdbedit --configfile="$LAB/etc/smb.conf" --create --password-from-stdin --user="$LAB_USER" >/dev/null
}

start() {
  case $1 in
    sshd) mkdir -p /run/sshd; start_process sshd /usr/sbin/sshd -D -e -f "$LAB/etc/sshd.conf" ;;
    smbd) start_process smbd /usr/sbin/smbd --foreground --no-process-group --configfile="$LAB/etc/smb.conf" ;;
    webdav) start_process webdav "$PYTHON" "$HERE/web_and_ftp.py" webdav "$WEBDAV_PORT" "$LAB/srv" "$LAB_USER" "$PASSWORD" ;;
    ftpd) start_process ftpd "$PYTHON" "$HERE/web_and_ftp.py" ftp "$FTP_PORT" "$LAB/srv" "$LAB_USER" "$PASSWORD" ;;
  esac
  local ports=([1]=$SFTP_PORT [2]=$SMB_PORT [3]=$WEBDAV_PORT [4]=$FTP_PORT) number
  case $1 in sshd) number=1 ;; smbd) number=2 ;; webdav) number=3 ;; *) number=4 ;; esac
  wait_until 40 bash -c "</dev/tcp/127.0.0.1/${ports[$number]}"
  running "$1" || { echo "$1 ended: $(tail -3 "$LAB/log/$1.out")" >&2; return 1; }
}

# Each connection to sshd and smbd has a process of its own, in the session of the server.
stop() {
  local pid
  pid=$(pid_of "$1")
  if [ -n "$pid" ] && running "$1"; then pkill -9 --session "$pid" || true; fi
  kill_process "$1"
}

case ${1:-} in
  install) install ;;
  up)
    [ ! -e "$LAB/run" ] || { echo "already there: $LAB" >&2; exit 1; }
    configure
    for name in sshd smbd webdav ftpd; do start $name; done
    ;;
  start | stop) "$1" "$2" ;;
  env) printf '%s\n' "username=$LAB_USER" "password=$PASSWORD" "folder=$LAB/srv/data" ;;
  down)
    for name in sshd smbd webdav ftpd; do stop $name; done
    if id "$LAB_USER" >/dev/null 2>&1; then
      pkill -9 -u "$LAB_USER" || true
      wait_until 10 userdel "$LAB_USER"
    fi
    wait_until 10 rm -rf "$LAB"
    ;;
  *) sed -n '2,14p' "$0"; exit 2 ;;
esac

# Sourced by the systems' scripts: daemons by name, below the folder $LAB.
# A pid file holds the process id and its start time, so that a number which the kernel has given
# to somebody else meanwhile is never taken for ours.

# start_time PID   Clock ticks since boot at which the process began; empty if there is none.
start_time() {
  # the command's name, in brackets, may hold spaces: count the fields after the last bracket
  sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20
}

# remember NAME PID
remember() {
  echo "$2 $(start_time "$2")" >"$LAB/run/$1.pid"
}

# start_process NAME COMMAND...   In a session of its own; what it prints goes to log/NAME.out.
start_process() {
  local name=$1
  shift
  setsid nohup "$@" >>"$LAB/log/$name.out" 2>&1 </dev/null &
  remember "$name" $!
}

# pid_of NAME
pid_of() {
  cut -d' ' -f1 "$LAB/run/$1.pid" 2>/dev/null
}

# running NAME   True if the very process that was started still runs (a zombie does not).
running() {
  local pid began
  read -r pid began 2>/dev/null <"$LAB/run/$1.pid" || return 1
  [ -n "$began" ] && [ "$(start_time "$pid")" = "$began" ] \
    && [ "$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | cut -c1)" != Z ]
}

# kill_process NAME...   kill -9, then wait until they are gone (5 s).
kill_process() {
  local name tries
  for name in "$@"; do
    if running "$name"; then kill -9 "$(pid_of "$name")" 2>/dev/null || true; fi
  done
  for name in "$@"; do
    for tries in $(seq 100); do
      running "$name" || break
      sleep 0.05
    done
  done
}

# wait_until SECONDS COMMAND...   Try ten times a second; fail loudly when the time is over.
wait_until() {
  local tries=$(($1 * 10))
  shift
  until "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || { echo "timed out waiting for: $*" >&2; return 1; }
    sleep 0.1
  done
}

# unmount FOLDER...   Whatever is mounted there, even if its server is dead.
unmount() {
  local folder
  for folder in "$@"; do
    if mountpoint -q "$folder" 2>/dev/null || grep -q " $folder " /proc/mounts; then
      umount -l "$folder" || true
    fi
  done
}

# lab_token   A short word that differs between lab folders, for names that the machine shares.
lab_token() {
  printf '%s' "$LAB" | cksum | cut -d' ' -f1
}

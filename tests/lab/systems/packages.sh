# Sourced by the systems' scripts: the Debian packages that a system needs.

# install_packages NAME...   Install what is missing; quick and silent when nothing is.
# No service of theirs is started: the lab starts its own, with its own configuration.
install_packages() {
  local missing=() name policy=/usr/sbin/policy-rc.d made_policy=""
  for name in "$@"; do
    dpkg-query --show --showformat='${db:Status-Abbrev}\n' "$name" 2>/dev/null | grep -q '^ii' \
      || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    made_policy=yes
  fi
  echo "installing: ${missing[*]}"
  local status=0
  apt-get update -qq >/dev/null \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      -o DPkg::Lock::Timeout=120 \
      "${missing[@]}" >/dev/null || status=$?
  [ -z "$made_policy" ] || rm -f $policy
  return $status
}

#!/usr/bin/env bash
# What tests need of the system beside Python: libibverbs, without which Mooncake's library does not
# load. Installed where that is possible; elsewhere those tests are skipped, and this says why.
set -euo pipefail

if ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1'; then
  exit 0
fi
if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  echo "kvferry: installing libibverbs1, which Mooncake's library needs" >&2
  if { apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1; } >&2; then
    exit 0
  fi
fi
echo "kvferry: there is no libibverbs here, so Mooncake's library does not load and its tests are" \
  "skipped; to have them: apt-get install libibverbs1" >&2

#!/usr/bin/env bash
# Runs a command quietly: one line while it works and when it is done, its output in a log, the log's end if it fails.
# Usage: step.sh LOG TITLE COMMAND [ARGUMENT...]
set -u
log=$1 title=$2
shift 2
mkdir -p "$(dirname "$log")"
SECONDS=0

tick() { # the last thing the command said, on a terminal only
  while sleep 1; do
    printf '\r\033[K  %s ... %d s  %.60s' "$title" "$SECONDS" "$(tail -n 1 "$log" 2>/dev/null | tr -d '\r')"
  done
}

printf '  %s ...' "$title"
ticker=
if [ -t 1 ]; then
  tick &
  ticker=$!
  trap 'kill "$ticker" 2>/dev/null' EXIT
else
  echo
fi

printf '\n== %s: %s\n' "$title" "$*" >>"$log"
"$@" >>"$log" 2>&1 </dev/null
status=$?

if [ -n "$ticker" ]; then
  kill "$ticker" 2>/dev/null
  wait "$ticker" 2>/dev/null
  printf '\r\033[K'
fi
if [ "$status" -eq 0 ]; then
  echo "  $title: done in $SECONDS s"
else
  echo "  $title: FAILED after $SECONDS s (exit status $status). The end of $log:"
  tail -n 25 "$log"
fi
exit "$status"

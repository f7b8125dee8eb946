#!/usr/bin/env bash
# progress.sh SECONDS: wait for SECONDS, or until all lanes have ended. Then show the last lines of the lanes and put the results into $OUT.
# With SAVE_CACHES=1 also what was compiled, as caches.tgz for the next machine.
end=$((SECONDS + $1))
while ((SECONDS < end)) && pgrep -f "offline_gpu/run_[a-z_]+\.sh" >/dev/null; do sleep 1; done
date +%T
nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
tail -n 12 /tmp/R/steps
find /tmp/R /tmp/cluster -maxdepth 2 -name "*.log" -printf "%T@ %p\n" 2>/dev/null | sort -rn | head -n 9 | while read -r _ log; do
  echo "== ${log}"
  tail -n 4 "${log}" | cut -c 1-240
done
tar -C /tmp -czf "${OUT:-/tmp}/results.tgz" R
if [[ -n ${SAVE_CACHES:-} ]]; then
  (cd "${HOME}" && shopt -s nullglob && tar --exclude=.cache/nibble/models -czf "${OUT:-/tmp}/caches.tgz" .cache .triton*)
  ls -lh "${OUT:-/tmp}/caches.tgz"
fi

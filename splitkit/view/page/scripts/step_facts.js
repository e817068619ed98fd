// @ts-check
// Reads from a step where the ranks idle, and when their memory is at its peak.

/** @typedef {{warmup: number, waiting: number, tail: number}} Idle seconds before the first action, between actions, after the last */

/**
 * @param {Run} run
 * @returns {Idle[]} of each rank
 */
export function idleOf(run) {
  return [...Array(run.ranks).keys()].map(rank => {
    const own = run.events.filter(event => event[0] === rank), first = Math.min(run.seconds, ...own.map(e => e[4])), last = Math.max(first, ...own.map(e => e[5]));
    const busy = own.reduce((sum, e) => sum + e[5] - e[4], 0);
    return {warmup: first, waiting: Math.max(0, last - first - busy), tail: run.seconds - last};
  });
}
/**
 * When the memory of a rank first reaches its peak.
 * @param {Run} run
 * @param {number} rank
 */
export function peakTime(run, rank) {
  const points = run.memory[rank], most = Math.max(...points.map(point => point[1]));
  const found = points.find(point => point[1] === most);
  return found ? found[0] : 0;
}
/**
 * The memory of a rank at a time, the larger value where it changes.
 * @param {Run} run
 * @param {number} rank
 * @param {number} seconds
 */
export function heldAt(run, rank, seconds) {
  let now = 0;
  for (const [time, nbytes] of run.memory[rank]) {
    if (time > seconds) break;
    now = time === seconds ? Math.max(now, nbytes) : nbytes;
  }
  return now;
}
/**
 * The rank of each stage.
 * @param {Run} run
 */
export function ranksOf(run) {
  /** @type {number[]} */
  const found = [];
  for (const [rank, , stage] of run.events) found[stage] = rank;
  return found;
}

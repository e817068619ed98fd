// @ts-check
// Reads from a step where the ranks idle, and when their memory is at its peak.

/**
 * A fact about a step that is computed once, as pictures ask for it in every frame.
 * @template T
 * @param {(run: Run) => T} compute
 * @returns {(run: Run) => T}
 */
function perRun(compute) {
  /** @type {WeakMap<Run, T>} */
  const found = new WeakMap();
  return run => {
    if (!found.has(run)) found.set(run, compute(run));
    return /** @type {T} */ (found.get(run));
  };
}
/** @type {Record<Kind, string>} */
export const COMPUTATIONS = {F: "forward", B: "backward", I: "backward: gradients of inputs", W: "backward: gradients of weights"};
/** @typedef {{warmup: number, waiting: number, tail: number}} Idle seconds before the first action, between actions, after the last */

/** Where each rank idles. */
export const idleOf = perRun(run => [...Array(run.ranks).keys()].map(rank => {
  const own = run.events.filter(event => event[0] === rank), first = Math.min(run.seconds, ...own.map(e => e[4])), last = Math.max(first, ...own.map(e => e[5]));
  const busy = own.reduce((sum, e) => sum + e[5] - e[4], 0);
  return /** @type {Idle} */ ({warmup: first, waiting: Math.max(0, last - first - busy), tail: run.seconds - last});
}));
/** When the memory of each rank first reaches its peak. */
const peakTimes = perRun(run => run.memory.map(points => {
  const most = Math.max(...points.map(point => point[1])), found = points.find(point => point[1] === most);
  return found ? found[0] : 0;
}));
/**
 * When the memory of a rank first reaches its peak.
 * @param {Run} run
 * @param {number} rank
 */
export const peakTime = (run, rank) => peakTimes(run)[rank];
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
/** The rank of each stage. */
export const ranksOf = perRun(run => {
  /** @type {number[]} */
  const found = [];
  for (const [rank, , stage] of run.events) found[stage] = rank;
  return found;
});

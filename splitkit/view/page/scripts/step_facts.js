// @ts-check
// Reads from a step where the ranks idle, and when their memory is at its peak.
import {sum} from "./totals.js";

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
  const busy = sum(own.map(e => e[5] - e[4]));
  return /** @type {Idle} */ ({warmup: first, waiting: Math.max(0, last - first - busy), tail: run.seconds - last});
}));
/**
 * The bytes of a rank at a point: weights and state, saved values, messages, temporary.
 * @param {MemoryByStage} by
 * @param {number} rank
 * @param {number[]} point
 */
export function kindsAt({units, owned, counts}, rank, point) {
  const found = [0, 0, point[1], 0];
  owned[rank].forEach((stage, j) => {
    const [fixed, ...each] = units[stage];
    found[0] += fixed;
    for (let i = 0; i < counts; i++) found[i === 1 ? 3 : 1] += each[i] * point[2 + counts * j + i];
  });
  return found;
}
/** The memory of each rank over time. */
export const memoryOf = perRun(({by}) => by.points.map((points, rank) => points.map(point => /** @type {Point} */ ([point[0], sum(kindsAt(by, rank, point))]))));
/**
 * When the memory of a rank first reaches its peak.
 * @param {Run} run
 * @param {number} rank
 */
export const peakTime = (run, rank) => run.by.points[rank][run.by.highest[rank]][0];
/**
 * The memory of a rank at a time, the larger value where it changes.
 * @param {Run} run
 * @param {number} rank
 * @param {number} seconds
 */
export function heldAt(run, rank, seconds) {
  let now = 0;
  for (const [time, nbytes] of memoryOf(run)[rank]) {
    if (time > seconds) break;
    now = time === seconds ? Math.max(now, nbytes) : nbytes;
  }
  return now;
}

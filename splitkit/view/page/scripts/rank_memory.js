// @ts-check
// Divides the memory of a rank by module: what a stage saves, the bands of the chart, and who is in flight.
import {OTHERS, REST} from "./bands.js";
import {colourOf} from "./drawing.js";
import {sum} from "./totals.js";

/** @typedef {import("./ladder.js").Ladder} Ladder */
/** @typedef {[number, string, number]} Value an op, or -1 for inputs of the graph, whether the stage saves, receives or sends what it makes, and bytes of one microbatch */

/** The bands that each stage has for its weights, and for what it saves; the last stands for all further modules. */
const BANDS = 6;
/** How much lighter or darker than its stage each of these bands is: neighbours differ. */
const TINTS = [0.1, 0.5, 0.25, 0.65, 0, 0.4];

/**
 * The bytes of weights and state in each row of a stage; null where they are not those of its rows.
 * @param {Ladder} p
 * @param {Run} run
 * @param {number} k
 * @returns {[number, number][] | null} row and bytes
 */
function weightsIn(p, run, k) {
  const start = p.borders[k], own = p.data.weights.slice(start, p.borders[k + 1]);
  return run.by.why || sum(own) !== run.by.units[k][0] ? null : own.map((nbytes, i) => [start + i, nbytes]);
}
/**
 * @param {string} colour
 * @param {number} share of white, or if negative of black
 */
const tint = (colour, share) => `#${[1, 3, 5].map(i => Math.round(parseInt(colour.slice(i, i + 2), 16) * (1 - Math.abs(share)) + (share > 0 ? 255 * share : 0)).toString(16).padStart(2, "0")).join("")}`;
/** @type {WeakMap<Item[], Map<number, import("./bands.js").Band[]>>} bands of a layout by rank, coarse ones by -1 - rank: folded layers are one band */
const drawn = new WeakMap();
/**
 * The bands of a rank from the bottom: weights and state of its stages by module, what they save by module, then what
 * waits for the weight part, messages and temporary memory. Together they are the bytes of each point.
 * @param {Ladder} p
 * @param {Run} run
 * @param {number} rank
 * @param {boolean} [coarse] one band for all modules of a stage
 */
export function bandsOfRank(p, run, rank, coarse = false) {
  const known = drawn.get(p.items) || new Map();
  drawn.set(p.items, known);
  const key = coarse ? -1 - rank : rank;
  if (!known.has(key)) known.set(key, divided(p, run, rank, coarse ? 1 : BANDS));
  return /** @type {import("./bands.js").Band[]} */ (known.get(key));
}
/**
 * @param {Ladder} p
 * @param {Run} run
 * @param {number} rank
 * @param {number} room the most bands of a stage for its weights, and for what it saves
 */
function divided(p, run, rank, room) {
  const {by} = run, points = by.points[rank];
  /** @type {import("./bands.js").Band[][]} */
  const [below, above, last] = [[], [], []];
  const series = (/** @type {(point: number[]) => number} */ of) => Float64Array.from(points, of);
  const add = (/** @type {import("./bands.js").Band[]} */ to, /** @type {string} */ name, /** @type {number} */ row, /** @type {string} */ kind, /** @type {string} */ colour, /** @type {Float64Array} */ bytes) => {
    if (bytes.some(nbytes => nbytes)) to.push({name, row, kind, colour, bytes});
  };
  // bands of the largest modules, and one of all others
  const modules = (/** @type {import("./bands.js").Band[]} */ to, /** @type {[number, number][]} */ entries, /** @type {string} */ kind, /** @type {(i: number) => string} */ colour, /** @type {(point: number[]) => number} */ count) => {
    /** @type {Map<number, number>} */
    const sums = new Map();
    for (const [row, nbytes] of entries) { const first = p.itemOf[row].start; sums.set(first, (sums.get(first) || 0) + nbytes); }
    const found = [...sums].filter(each => each[1]).sort((a, b) => b[1] - a[1] || a[0] - b[0]), shown = found.length > room ? room - 1 : found.length, others = found.slice(shown);
    found.slice(0, shown).forEach(([row, nbytes], i) => add(to, p.name(p.itemOf[row]), row, kind, colour(i), series(point => nbytes * count(point))));
    if (others.length) add(to, `${others.length} other modules`, -1, kind, colour(shown), series(point => sum(others.map(each => each[1])) * count(point)));
  };
  by.owned[rank].forEach((k, j) => {
    const [fixed, saved, , captured, left] = by.units[k], at = 2 + by.counts * j, colour = colourOf(k), weights = weightsIn(p, run, k), stage = `stage ${p.partName(k)}`;
    // where all saved values wait for the weight part, they are held until then
    const stays = by.counts > 2 && left === saved, count = (/** @type {number[]} */ point) => point[at] + (stays ? point[at + 3] : 0), dark = (/** @type {number} */ i) => tint(colour, -0.25 - TINTS[i] / 2), light = (/** @type {number} */ i) => tint(colour, TINTS[i]);
    if (weights) modules(below, weights, "weights, state", dark, () => 1);
    else add(below, stage, -1, "weights, state", dark(0), series(() => fixed));
    const {values, rest} = p.heldIn(run, k), own = values.filter(each => each[1] !== "received");
    modules(above, own.map(([op, , nbytes]) => [p.ops.row[op], nbytes]), "saved", light, count);
    add(above, stage, -1, "received", tint(colour, 0.8), series(point => sum(values.map(each => each[1] === "received" ? each[2] : 0)) * count(point)));
    add(above, stage, -1, values.length ? "copies" : "saved", tint(colour, 0.75), series(point => rest * count(point)));
    if (by.counts < 4) return;
    if (!stays) add(last, stage, -1, "waits", tint(colour, 0.7), series(point => left * point[at + 3]));
    add(last, stage, -1, "captured", tint(colour, -0.2), series(point => captured * point[at + 2]));
  });
  add(last, "messages", -1, "", OTHERS, series(point => point[1]));
  add(last, "temporary", -1, "", REST, series(point => sum(by.owned[rank].map((k, j) => by.units[k][2] * point[3 + by.counts * j]))));
  return [...below, ...above, ...last];
}
/**
 * Who is in flight at a point: the microbatches of each stage of the rank by count, and the action that runs. The counts
 * of the point tell which of the changes at its time have happened.
 * @param {Run} run
 * @param {number} rank
 * @param {number} i the number of the point
 * @returns {{sets: Set<number>[], runs: TimedAction | null}} for each of its stages a set for each count; that of running actions stays empty
 */
export function inFlight({by, events}, rank, i) {
  const {owned, counts} = by, [time, , ...wanted] = by.points[rank][i];
  const sets = owned[rank].flatMap(() => [...Array(counts)].map(() => /** @type {Set<number>} */ (new Set())));
  /** @type {TimedAction | null} */
  let runs = null;
  const isThere = () => sets.every((set, n) => (n % counts === 1 ? Number(!!runs && runs[2] === owned[rank][(n - 1) / counts]) : set.size) === wanted[n]);
  for (const event of events.filter(each => each[0] === rank)) for (const begins of [true, false]) {
    const [, kind, stage, microbatch, start, end] = event, at = begins ? start : end, own = counts * owned[rank].indexOf(stage);
    if (at > time || (at === time && isThere())) return {sets, runs};
    runs = begins ? event : null;
    if (begins && kind === "F") sets[own].add(microbatch);
    if (begins && kind === "I") sets[own + 2].add(microbatch);
    if (begins) continue;
    if (kind === "B" || kind === "I") sets[own].delete(microbatch);
    if (kind === "I") sets[own + 3].add(microbatch);
    if (kind === "W") for (const waits of [2, 3]) sets[own + waits].delete(microbatch);
  }
  return {sets, runs};
}
/**
 * The last point of a rank that is not after a time.
 * @param {Run} run
 * @param {number} rank
 * @param {number} seconds
 */
export const pointAt = (run, rank, seconds) => Math.max(0, run.by.points[rank].filter(point => point[0] <= seconds).length - 1);

// @ts-check
// Resimulates a pipeline step after borders have moved.
// It does what splitkit/pipeline/simulate.py and memory.py do, for undivided backward and no replicas: run each rank's
// actions in order, each as soon as its inputs are there. tests/view/test_page_numbers.py compares the two.
import {bytesAt} from "./step_facts.js";
import {known, sum} from "./totals.js";

/**
 * An action of a rank, with its times after it has run.
 * @typedef {{rank: number, kind: Kind, stage: number, m: number, i: number, need: Timed | null, far: boolean, sends: boolean,
 *   trip: number, forward: boolean, start: number, end: number, departure: number, arrival: number}} Timed
 */

/**
 * The actions of each rank in order; null if the schedule does not allow that many stages.
 * @param {Run} run
 * @param {Again} again
 * @param {number} count
 * @returns {(Action | TimedAction)[] | null}
 */
function orderOf(run, again, count) {
  if (count === run.stages) return run.events;
  const windows = again.windows && again.windows[count], m = run.microbatches;
  /** @type {Action[]} */
  const found = [];
  if (!windows) return null;
  windows.forEach((window, rank) => {
    for (let i = 0; i < m + window - 1; i++) {
      if (i < m) found.push([rank, "F", rank, i]);
      if (i >= window - 1) found.push([rank, "B", rank, i - window + 1]);
    }
  });
  return found;
}
/**
 * The step with other stages; null if the data for it is missing.
 * @param {Run | null} run
 * @param {Stage[]} stages
 * @param {Map<number, number>} place row -> its mark
 * @returns {Run | null}
 */
export function simulated(run, stages, place) {
  const again = run && run.again, order = again && stages.every(s => s.peak >= 0) && orderOf(run, again, stages.length);
  if (!order) return null;
  const {overlap, trips, down, up} = again, ranks = Math.max(...order.map(e => e[0])) + 1;
  /** @type {number[]} */
  const rankOf = [];
  /** @type {Timed[][]} */
  const lists = Array.from({length: ranks}, () => []);
  const at = Array(ranks).fill(0), free = Array(ranks).fill(0);
  /** @type {Record<string, number>} */
  const idle = {};
  /** @type {Map<string, Timed>} */
  const done = new Map();
  order.forEach(([rank, kind, stage, m], i) => {
    rankOf[stage] = rank;
    lists[rank].push({rank, kind, stage, m, i, need: null, far: false, sends: false, trip: 0, forward: kind === "F", start: 0, end: 0, departure: 0, arrival: 0});
  });
  const remote = (/** @type {number} */ a, /** @type {number} */ b) => b >= 0 && b < stages.length && rankOf[a] !== rankOf[b];
  const takes = (/** @type {number[]} */ table, /** @type {number} */ k, /** @type {number} */ row) => trips[table[k] ?? table[0]][known(place, row)];
  const ready = (/** @type {Timed} */ a) => {
    const {forward} = a, from = a.stage + (forward ? -1 : 1), to = a.stage - (forward ? -1 : 1), edge = from < 0 || from >= stages.length, own = stages[a.stage];
    a.need = edge ? null : done.get(`${a.kind}${from} ${a.m}`) || null;
    if ((!edge && !a.need) || (!forward && !done.has(`F${a.stage} ${a.m}`))) return false;
    a.far = remote(a.stage, from);
    a.sends = remote(a.stage, to);
    a.trip = !a.sends ? 0 : forward ? takes(down, a.stage, own.end) : takes(up, a.stage - 1, own.start);
    a.start = Math.max(free[a.rank], !a.need ? 0 : overlap ? a.need.arrival : a.need.departure) + (!overlap && a.far && a.need ? a.need.trip : 0);
    a.departure = a.end = a.start + (forward ? own.forward : own.backward);
    a.arrival = a.end + a.trip;
    if (overlap && a.sends) {
      const wire = `${a.rank} ${rankOf[to]}`;
      a.departure = Math.max(a.end, idle[wire] || 0);
      a.arrival = idle[wire] = a.departure + a.trip;
    }
    free[a.rank] = overlap ? a.end : a.arrival;
    done.set(`${a.kind}${a.stage} ${a.m}`, a);
    return true;
  };
  // go over the ranks until no action becomes ready: an order without deadlock ends with all of them done
  for (let before = -1; before < done.size;) {
    before = done.size;
    lists.forEach((list, rank) => { while (at[rank] < list.length && ready(list[at[rank]])) at[rank]++; });
  }
  const all = lists.flat(), seconds = Math.max(...all.map(a => a.end)), busy = sum(all.map(a => a.end - a.start));
  return {...run, ranks, seconds, bubble: seconds ? 1 - busy / (seconds * ranks) : 0, replicas: Array(ranks).fill(1), whatIf: null, measured: null, events: all.map(a => [a.rank, a.kind, a.stage, a.m, a.start, a.end]),
    ...heldBy(lists, stages, run.microbatches, again, remote)};
}
/**
 * The memory of each rank over time, by stage, and its peak. Changes at the same time are applied in the order of the
 * actions, and the highest value among them counts.
 * @param {Timed[][]} lists
 * @param {Stage[]} stages
 * @param {number} m microbatches
 * @param {Again} again
 * @param {(a: number, b: number) => boolean} remote
 */
function heldBy(lists, stages, m, {static: still, kept}, remote) {
  /** @type {[number, number, number, number][][]} time, place, the index in a point, and by how much it changes */
  const changes = lists.map(() => []), owned = lists.map(list => [...new Set(list.map(a => a.stage))].sort((a, b) => a - b));
  const held = (/** @type {number} */ rank, /** @type {number} */ index, /** @type {number} */ amount, /** @type {number} */ start, /** @type {number} */ first, /** @type {number} */ stop, /** @type {number} */ last) => {
    if (amount) changes[rank].push([start, first, index, amount], [stop, last, index, -amount]);
  };
  const came = (/** @type {number} */ k) => stages[k - 1].down, back = (/** @type {number} */ k) => stages[k].up;
  const buffers = owned.map(own => sum(own.map(k => (still && remote(k, k - 1) ? m * came(k) : 0) + (still && remote(k, k + 1) ? m * back(k + 1) : 0))));
  const units = stages.map((stage, k) => [stage.fixed, Math.max(0, stage.saved - (still && remote(k, k - 1) ? came(k) : 0)), stage.temporary, 0, 0]);
  /** @type {Map<string, Timed>} */
  const began = new Map(), end = Math.max(...lists.flat().map(a => a.end));
  for (const a of lists.flat()) {
    const own = stages[a.stage], first = 2 * a.i, last = first + 1, saved = 2 + 2 * owned[a.rank].indexOf(a.stage);
    held(a.rank, saved + 1, 1, a.start, first, a.end, last);
    if (a.forward) began.set(`${a.stage} ${a.m}`, a);
    else {
      const f = known(began, `${a.stage} ${a.m}`);
      held(a.rank, saved, 1, f.start, 2 * f.i, a.end, last);
      if (a.need && !a.far) held(a.rank, 1, back(a.need.stage), a.need.end, 2 * a.need.i + 1, a.end, last);
      if (kept ? a.sends : a.arrival > a.end) held(a.rank, 1, own.up, a.end, last, kept ? end : a.arrival, Infinity);
      if (kept && f.sends) held(a.rank, 1, own.down, a.end, last, end, Infinity);
    }
    if (a.far && a.need && !still) held(a.rank, 1, a.forward ? came(a.stage) : back(a.need.stage), a.need.departure, -1, a.forward ? a.start : a.end, a.forward ? first : last);
  }
  /** @type {MemoryByStage} */
  const by = {units, owned, counts: 2, points: [], static: still, why: ""};
  by.points = changes.map((own, rank) => {
    const now = [0, buffers[rank], ...owned[rank].flatMap(() => [0, 0])], points = [[...now]], total = (/** @type {number[]} */ point) => bytesAt(by, rank, point);
    own.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    for (let i = 0; i < own.length;) {
      const time = now[0] = own[i][0];
      let most = time ? null : points.pop();
      while (i < own.length && own[i][0] === time) {
        const place = own[i][1];
        while (i < own.length && own[i][0] === time && own[i][1] === place) now[own[i][2]] += own[i++][3];
        if (!most || total(now) > total(most)) most = [...now];
      }
      if (most) points.push(most);
      if (String(most) !== String(now)) points.push([...now]);
    }
    return points;
  });
  return {by, peaks: by.points.map((points, rank) => Math.max(...points.map(point => bytesAt(by, rank, point))))};
}

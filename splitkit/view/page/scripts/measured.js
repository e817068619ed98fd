// @ts-check
// Compares a step that ran with the simulated one: how much longer or shorter each action took, and each rank computed.
import {remark, el, tableOf} from "./elements.js";
import {COMPUTATIONS, memoryOf} from "./step_facts.js";
import {sum} from "./totals.js";
import {duration, percent, size} from "./units.js";

// ColorBrewer's PiYG: colour-blind readers can tell it apart, and no stage has these colours
export const SLOWER = "#c51b7d";
export const AS_SAID = "#a9b0ba";
export const FASTER = "#4d9221";
/** Steps whose times differ by more than this factor are drawn on two scales: else one of them would be a sliver. */
const FAR = 3;

/**
 * How many measured seconds are drawn as one: 1, but the ratio of both steps where they are far apart.
 * @param {Run} run
 * @param {MeasuredRun} measured
 */
export function ownScale(run, measured) {
  const ratio = measured.seconds / (run.seconds || 1);
  return ratio > FAR || ratio < 1 / FAR ? ratio : 1;
}
/**
 * The seconds that the chart shows.
 * @param {Run} run
 */
export const spanOf = run => run.measured ? Math.max(run.seconds, run.measured.seconds / ownScale(run, run.measured)) : run.seconds;
/**
 * The most bytes that a rank held when the step ran; 0 where that was not measured.
 * @param {Run} run
 */
export const highest = run => !run.measured ? 0 : Math.max(0, ...run.measured.memory.map((_, rank) => Math.max(...heldWhenRun(run, /** @type {MeasuredRun} */ (run.measured), rank).map(point => point[1]))));
/**
 * The memory of a rank when the step ran: what it held before the step is taken to be what the simulated rank holds then.
 * @param {Run} run
 * @param {MeasuredRun} measured with memory
 * @param {number} rank
 * @returns {Point[]} on the scale of the chart
 */
export function heldWhenRun(run, measured, rank) {
  const fixed = memoryOf(run)[rank][0][1], scale = ownScale(run, measured);
  return [[0, fixed], ...measured.memory[rank].map(([seconds, nbytes]) => /** @type {Point} */ ([seconds / scale, fixed + nbytes]))];
}
/**
 * Measured by simulated time of an action.
 * @param {Run} run
 * @param {MeasuredRun} measured
 * @param {number} i the number of the event
 */
function ratioOf(run, measured, i) {
  const [, , , , start, end] = run.events[i], [begin, stop] = measured.times[i];
  return (stop - begin) / Math.max(end - start, 1e-15);
}
/**
 * The colour of a measured action: the more it differs from what was simulated, the stronger. Where all differ by a large
 * factor, as on another device, that factor is taken as given.
 * @param {Run} run
 * @param {MeasuredRun} measured
 * @param {number} i the number of the event
 */
export function colourOfChange(run, measured, i) {
  const change = Math.max(-1, Math.min(1, Math.log2(ratioOf(run, measured, i) / ownScale(run, measured))));
  const mixed = (/** @type {number} */ at) => Math.round(parseInt(AS_SAID.slice(at, at + 2), 16) * (1 - Math.abs(change)) + parseInt((change > 0 ? SLOWER : FASTER).slice(at, at + 2), 16) * Math.abs(change));
  return `#${[1, 3, 5].map(at => mixed(at).toString(16).padStart(2, "0")).join("")}`;
}
/** @param {number} ratio */
const compared = ratio => ratio > 10 ? `×${ratio.toFixed(0)}` : percent(ratio - 1);
/**
 * @param {Run} run
 * @param {MeasuredRun} measured
 */
export function measuredTitle(run, measured) {
  const scale = ownScale(run, measured), ratio = measured.seconds / (run.seconds || 1);
  return `measured: step ${duration(measured.seconds, "s")} (${compared(ratio)} against the simulated one${scale === 1 ? "" : "; drawn on a scale of its own"})`;
}
/**
 * @param {Run} run
 * @param {MeasuredRun} measured
 * @param {number} i the number of the event
 * @param {string} stage
 */
export function measuredText(run, measured, i, stage) {
  const [rank, kind, , microbatch, start, end] = run.events[i], [begin, stop] = measured.times[i];
  return `measured: ${COMPUTATIONS[kind]} of microbatch ${microbatch}, stage ${stage}, rank ${rank}\nstarted at ${duration(begin, "s")}, took ${duration(stop - begin, "s")}; simulated ${duration(end - start, run.unit)} (${compared(ratioOf(run, measured, i))})`;
}
/**
 * What each rank computed and held, simulated and measured.
 * @param {Run} run
 * @param {MeasuredRun} measured
 */
export function measuredTable(run, measured) {
  const busy = (/** @type {number} */ rank) => [sum(run.events.map(e => e[0] === rank ? e[5] - e[4] : 0)), sum(measured.times.map(([start, end], i) => run.events[i][0] === rank ? end - start : 0))];
  const rows = [...Array(run.ranks).keys()].map(rank => {
    const row = el("tr"), [said, was] = busy(rank), points = measured.memory[rank];
    row.append(el("td", String(rank)), el("td", duration(said, run.unit)), el("td", duration(was, "s")), el("td", compared(was / (said || 1))), el("td", points && points.length ? size(Math.max(...points.map(p => memoryOf(run)[rank][0][1] + p[1]))) : "–"));
    return row;
  });
  const name = "step as it ran: seconds that each rank computed";
  return [el("h3", name), tableOf(name, ["rank", "simulated", "measured", "change", "peak"], rows), remark(measuredTitle(run, measured))];
}

// @ts-check
// Says what a stage, a border and a ribbon of a plan in stages are: the texts of tooltips and of the legend.
import {OTHERS, REST} from "./bands.js";
import {crossing, linesOf} from "./crossing.js";
import {ARROW, LIMIT, RIBBON} from "./legend.js";
import {AS_SAID, FASTER, SLOWER} from "./measured.js";
import {ranksOf} from "./step_facts.js";
import {duration, size} from "./units.js";

/** @typedef {import("./ladder.js").Ladder} Ladder */

/**
 * ``rank 0``, with replicas where there are some; "" if no schedule says which rank has the stage.
 * @param {Ladder} p
 * @param {number} k
 */
export function rankText(p, k) {
  const {run} = p, rank = run ? ranksOf(run)[k] : undefined;
  if (!run || rank === undefined) return "";
  return `rank ${rank}${run.replicas[rank] > 1 ? `, ${run.replicas[rank]} replicas` : ""}`;
}
/**
 * @param {Ladder} p
 * @param {number} k
 */
export function stageText(p, k) {
  const stage = p.stages[k], {unit} = p.data, rank = rankText(p, k);
  const memory = p.trains ? `weights and state ${size(stage.fixed)}\nheld ${size(stage.saved)}\ntemporary ${size(stage.temporary)}` : `weights${p.data.tokens ? ` and cache of ${p.data.tokens} tokens` : ""} ${size(stage.fixed)}\ntemporary ${size(stage.temporary)}`;
  return `stage ${p.partName(k)}${rank ? `, ${rank}` : ""}${p.runsAgain[k] ? "\nkeeps its inputs only, and runs again in backward" : ""}\nforward ${duration(stage.forward, unit)}${p.trains ? `, ${p.backwardName} ${duration(stage.backward, unit)}${p.moreTimes(k)}` : ""}\nwith one microbatch ${size(stage.peak)}:\n${memory}`;
}
/**
 * @param {Ladder} p
 * @param {number} k the border above stage k
 */
export function borderText(p, k) {
  const row = p.borders[k], {down, up} = p.data, {ops} = p, found = crossing(ops, p.readers, row);
  const below = (/** @type {number} */ op) => p.readers[op].filter(reader => ops.row[reader] >= row);
  const lines = linesOf(ops, found.map(op => [op, ops.bytes(op)]), below);
  const head = `${p.partName(k - 1)} to ${p.partName(k)}: ${size(down[row])} forward${p.trains ? `, ${size(up[row])} of gradients back` : ""}`;
  return [`${head}, for each microbatch`, ...lines].join("\n");
}
/**
 * @param {Ladder} p
 * @returns {import("./legend.js").Entry[]}
 */
export function legendOf(p) {
  const {data} = p, colour = COLOURS[0];
  /** @type {import("./legend.js").Entry[]} */
  const found = [["", colour, "each stage has a colour: its band, boxes and actions"], ARROW];
  if (p.trains) found.push(RIBBON);
  if (p.trains && p.movable) found.push(["ribbon", "var(--fg)", "made in one stage, saved in another"]);
  if (p.runsAgain.includes(true)) found.push(["hatched", colour, "runs again in backward: such a stage keeps only its inputs"]);
  found.push(...p.moreLegend());
  found.push(["dashed", "var(--fg)", `a border: ▼ bytes sent forward${p.trains ? ", ▲ gradients sent back" : ""}`], ["sign", "var(--fg)", "◆ the slowest stage"]);
  if (data.memory) found.push(LIMIT);
  if (p.run) {
    found.push(["pale", colour, "forward of a microbatch"]);
    const divided = p.run.events.some(event => event[1] === "W");
    if (p.trains) found.push(["", colour, divided ? "backward, or its part for the gradients of inputs" : "backward"]);
    if (divided) found.push(["middle", colour, "backward: the part for the gradients of weights"]);
    found.push(["sign", "var(--fg)", p.run.stages > p.run.ranks ? "3·0: microbatch 0 in stage 3" : "the number on an action: its microbatch"]);
    found.push(["pale", colour, "in the step: memory of the rank by module; dark shades: weights, with gradients and state"]);
    found.push(["", OTHERS, "messages on their way or not yet read"], ["", REST, "temporary memory of the action that runs"], ["sign", "var(--fg)", "▾ peak of the rank"]);
    if (divided) found.push(["sign", "var(--fg)", "waits, captured: held for the gradients of weights"]);
  }
  if (p.run && p.run.measured) found.push(["", SLOWER, "measured: took longer than simulated; the strongest colour is twice as long"], ["", FASTER, "measured: took less"], ["", AS_SAID, "measured: as simulated"]);
  if (p.run && p.run.measured && p.run.measured.memory.length) found.push(["line", "var(--fg)", "in the step: memory as measured"]);
  if (data.beside.length) found.push(["sign", "var(--fg)", "moved: in another stage of a plan beside"]);
  return found;
}

// @ts-check
// Lists what is alive at a step of forward and backward, or on a rank of a pipeline, the largest first.
import {el, pressed, remark, tableOf} from "./elements.js";
import {inFlight} from "./rank_memory.js";
import {COMPUTATIONS, kindsAt} from "./step_facts.js";
import {sum} from "./totals.js";
import {duration, size} from "./units.js";

const LISTED = 12;

/**
 * What is alive at a step and not tiny, the largest first.
 * @param {StepMemory} memory
 * @param {number} step
 */
export const aliveAt = (memory, step) => memory.alive.filter(([, , born, dies]) => born <= step && step <= dies);
/**
 * What it costs not to keep a value: the change to the nearest of the other plans that recomputes its op.
 * @param {import("./joint.js").Halves} p
 * @param {number} op
 * @returns {[string, string]} in short, and in words
 */
function priceOfNotKeeping(p, op) {
  const {choice, data} = p, time = (/** @type {number} */ seconds) => duration(seconds, data.unit);
  if (p.again.has(op)) return ["recomputed", `backward recomputes it in ${time(p.ops.seconds(op))}`];
  const other = data.choices.filter(each => each.again.includes(op)).sort((a, b) => Math.abs(a.seconds - choice.seconds) - Math.abs(b.seconds - choice.seconds))[0];
  if (!other) return [`≥ ${time(p.ops.seconds(op))}`, "no plan here recomputes it; its own op takes at least this"];
  const more = other.seconds - choice.seconds, text = `${more < 0 ? "−" : "+"}${time(Math.abs(more))}`;
  return [text, `plan ${data.choices.indexOf(other)}, the nearest that recomputes it: ${text} of recomputation, peak ${size(other.peak)} instead of ${size(choice.peak)}`];
}
/**
 * @param {import("./joint.js").Halves} p
 * @param {number} step
 */
export function aliveTable(p, step) {
  const {ops, choice, timeline} = p, found = aliveAt(choice.memory, step), whole = timeline.bytes[step], op = timeline.ops[step];
  const entries = found.slice(0, LISTED).map(([maker, kind, , , nbytes]) => {
    const [price, why] = typeof maker === "number" && kind === "saved" ? priceOfNotKeeping(p, maker) : ["", ""];
    return /** @type {Entry} */ ([maker, kind, nbytes, price, why]);
  });
  const box = valueTable(p, `alive at step ${step}${op >= 0 ? `, ${ops.name[op]}` : ""}: ${size(whole)}`, "not keeping it", entries), rest = whole - sum(entries.map(each => each[2]));
  if (rest > 0) box.append(remark(`and ${found.length > LISTED ? `${found.length - LISTED} more, ` : ""}what ops take while they run and smaller ones: ${size(rest)}`));
  return box;
}
/** @typedef {[number | string, string, number, string, string]} Entry op or name, kind, bytes, the last cell, and what the tooltip adds */
/**
 * A table of values; a click selects the op that makes one.
 * @param {import("./picture.js").Picture<CommonData>} p
 * @param {string} name
 * @param {string} title of the last column; "" for none
 * @param {Entry[]} entries
 */
function valueTable(p, name, title, entries) {
  const {ops} = p, box = el("section", undefined, {class: "alive"});
  const rows = entries.map(([maker, kind, nbytes, last, why]) => {
    const isOp = typeof maker === "number", row = el("tr", undefined, isOp ? pressed(() => p.select({op: maker}, true)) : {});
    // without a last column, type and line of Python have a line of their own
    const more = isOp && !title ? [`\n${ops.value(maker)}`, `\n${ops.source(maker).split(": ")[0]}`] : ["", ""];
    row.append(el("td", isOp ? ops.name[maker] + more[0] : maker), el("td", isOp ? ops.within(maker) + more[1] : ""), el("td", kind), el("td", size(nbytes)), ...(title ? [el("td", last)] : []));
    if (isOp) row.title = [ops.value(maker), ops.source(maker), why].filter(text => text).join("\n");
    return row;
  });
  box.append(el("h3", name), tableOf(name, ["value", "module", "kind", "bytes", ...(title ? [title] : [])], rows));
  return box;
}
/** @param {Set<number>} microbatches */
const listed = microbatches => `${microbatches.size > 1 ? "microbatches" : "microbatch"} ${[...microbatches].join(", ")}`;
/**
 * What is alive on a rank at an instant: what its microbatches in flight have saved, the largest first, and all else.
 * @param {import("./ladder.js").Ladder} p
 * @param {Instant} at
 */
export function aliveOnRank(p, {run, rank, i}) {
  const {by} = run, point = by.points[rank][i], {sets, runs} = inFlight(run, rank, i), time = duration(point[0], run.unit), [fixed, , messages, temporary] = kindsAt(by, rank, point);
  /** @type {Entry[]} */
  const entries = [];
  /** @type {string[]} */
  const lines = [];
  by.owned[rank].forEach((k, j) => {
    const own = sets.slice(by.counts * j, by.counts * (j + 1)), [, saved, , captured, left] = by.units[k], stays = by.counts > 2 && left === saved, stage = `stage ${p.partName(k)}`;
    const held = new Set(stays ? [...own[0], ...own[3]] : own[0]), {values, rest} = p.heldIn(run, k), times = held.size > 1 ? ` ×${held.size}` : "";
    if (held.size && saved) {
      const again = by.why || p.isAgain(k) || !p.offersRecompute ? "" : `; to keep only what it receives and sends would cost its forward again, ${duration(p.stages[k].forward, run.unit)} each`;
      lines.push(`${stage} holds ${listed(held)}, ${size(saved)} each${again}`);
      for (const [op, kind, nbytes] of values) entries.push([op < 0 ? "inputs of the graph" : op, kind + times, nbytes * held.size, "", `${stage}: ${size(nbytes)} for each of ${listed(held)}`]);
      if (rest) entries.push([values.length ? `${stage}: copies of what it receives and sends${p.isAgain(k) ? ", and the state of the random number generator" : ""}` : `${stage}: all that it saves`, times.trim(), rest * held.size, "", ""]);
    }
    if (by.counts < 4) return;
    if (!stays && own[3].size) entries.push([`${stage}: waits for gradients of weights`, `×${own[3].size}`, left * own[3].size, "", ""]);
    if (captured && own[2].size) entries.push([`${stage}: captured for gradients of weights`, `×${own[2].size}`, captured * own[2].size, "", ""]);
  });
  entries.sort((a, b) => b[2] - a[2]);
  const box = valueTable(p, `alive on rank ${rank} at ${time}: ${size(sum(kindsAt(by, rank, point)))}`, "", entries.slice(0, LISTED)), more = entries.slice(LISTED);
  if (more.length) box.append(remark(`and ${more.length} more: ${size(sum(more.map(each => each[2])))}`));
  const running = runs ? `, temporary memory of ${COMPUTATIONS[runs[1]]} of microbatch ${runs[3]} in stage ${p.partName(runs[2])} ${size(temporary)}` : "";
  box.append(remark(`besides: weights and state ${size(fixed)}, messages ${size(messages)}${running}`), ...lines.map(remark));
  if (by.why) box.append(remark(`not divided by module: ${by.why}`));
  return box;
}

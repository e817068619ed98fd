// @ts-check
// Lists what is alive at a step of forward and backward, the largest first.
import {el, pressed, remark, tableOf} from "./elements.js";
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
  const {ops, choice, timeline} = p, found = aliveAt(choice.memory, step), shown = found.slice(0, LISTED), whole = timeline.bytes[step], op = timeline.ops[step];
  const rows = shown.map(([maker, kind, , , nbytes]) => {
    const isOp = typeof maker === "number", [price, why] = isOp && kind === "saved" ? priceOfNotKeeping(p, maker) : ["", ""], row = el("tr", undefined, isOp ? pressed(() => p.select({op: maker}, true)) : {});
    row.append(el("td", isOp ? ops.name[maker] : maker), el("td", isOp ? ops.within(maker) : ""), el("td", kind), el("td", size(nbytes)), el("td", price));
    if (isOp) row.title = [ops.source(maker), why].filter(text => text).join("\n");
    return row;
  });
  const rest = whole - sum(shown.map(each => each[4])), box = el("section", undefined, {class: "alive"});
  const name = `alive at step ${step}${op >= 0 ? `, ${ops.name[op]}` : ""}: ${size(whole)}`;
  box.append(el("h3", name), tableOf(name, ["value", "module", "kind", "bytes", "not keeping it"], rows));
  if (rest > 0) box.append(remark(`and ${found.length > LISTED ? `${found.length - LISTED} more, ` : ""}what ops take while they run and smaller ones: ${size(rest)}`));
  return box;
}

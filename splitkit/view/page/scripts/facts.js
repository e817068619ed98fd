// @ts-check
// Shows in the side panel the facts about the selected op or row, and says in a tooltip what is below the mouse.
import {keptText} from "./crossing.js";
import {sum} from "./totals.js";
import {duration, size, bytesOf, measure} from "./units.js";
import {el} from "./elements.js";

/** @typedef {[string, string]} Fact a name and a value */
/** @typedef {import("./picture.js").Picture<CommonData>} AnyPicture */

/**
 * @param {AnyPicture} p
 * @param {number} op
 * @returns {Fact[]}
 */
export function factsOfOp({ops, data}, op) {
  return [["op", ops.op(op)], ["node", ops.name[op]], ["module", ops.module(op) || "(top level)"], ["value", ops.value(op)], ["bytes", size(ops.bytes(op))], [measure(data.unit), duration(ops.seconds(op), data.unit)], ["source", ops.source(op) || "unknown"]];
}
/**
 * @param {AnyPicture} p
 * @param {number} row
 * @returns {Fact[]}
 */
export function factsOfRow(p, row) {
  const item = p.itemOf[row], price = p.priceOf(item.start, item.end), {rows, unit} = p.data;
  /** @type {Fact[]} */
  const found = [["module", p.name(item)], ["ops", String(sum(rows.slice(item.start, item.end).map(r => r.ops)))], ["forward", duration(price.forward, unit)]];
  return p.trains ? [...found, ["backward", duration(price.backward, unit)], ["saved", size(price.saved)]] : found;
}
/**
 * @param {AnyPicture} p
 * @param {Fact[]} facts
 */
export function showFacts(p, facts) {
  const list = el("dl");
  facts.forEach(([name, value]) => list.append(el("dt", name), el("dd", value)));
  p.side.append(el("h3", "selected"), list);
}
/**
 * A field for the memory limit of each device.
 * @param {AnyPicture} p
 */
export function limitField(p) {
  const {memory} = p.data, name = "memory limit of each device", label = el("label", `${name} `, {class: "limit"});
  const field = el("input", undefined, {type: "text", size: 10, placeholder: "80GiB", "aria-label": name, onchange: () => {
    const found = bytesOf(field.value), isSize = found === null || found > 0;
    field.setAttribute("aria-invalid", String(!isSize));
    if (isSize) p.setLimit(found);
  }});
  field.value = memory ? size(memory) : "";
  label.append(field);
  return label;
}
/**
 * @param {AnyPicture} p
 * @param {Target} at
 */
export function targetText(p, {op, row, frame, ribbon}) {
  const {ops, data: {unit}} = p, time = (/** @type {number} */ seconds) => duration(seconds, unit);
  if (op !== undefined) {
    const source = ops.source(op);
    return `${ops.name[op]}  (${ops.op(op)})\n${ops.within(op)}\n${ops.value(op)}, ${size(ops.bytes(op))}, ${time(ops.seconds(op))}${source ? `\n${source}` : ""}`;
  }
  if (row !== undefined && frame) {
    const found = p.frameOf(row, frame);
    return found ? `${found.module}\n${found.ops.length} ops, ${time(sum(found.ops.map(i => ops.seconds(i))))}\ndouble-click ${found.open ? "closes" : "opens"} it` : "";
  }
  return row !== undefined ? rowText(p, row) : ribbon ? ribbonText(p, ribbon) : "";
}
/**
 * @param {AnyPicture} p
 * @param {number} row
 */
function rowText(p, row) {
  const {ops, data: {unit}} = p, item = p.itemOf[row], price = p.priceOf(item.start, item.end), lines = new Set(p.opsOf[row].map(i => ops.source(i)).filter(line => line));
  const more = lines.size ? `\n${[...lines].slice(0, 3).join("\n")}${lines.size > 3 ? `\nand ${lines.size - 3} more lines` : ""}` : "";
  return `${p.name(item)}\nforward ${duration(price.forward, unit)}${p.trains ? `, ${p.backwardName} ${duration(price.backward, unit)}, saved ${size(price.saved)}` : ""}${more}`;
}
/**
 * @param {AnyPicture} p
 * @param {[number, number, number?]} ribbon the numbers of two items, and 1 for what waits between the parts of backward
 */
function ribbonText(p, [from, to, waits]) {
  const found = (waits ? p.waitingRibbons : p.ribbons).find(r => r[0] === from && r[1] === to), [a, b] = [p.items[from], p.items[to]];
  if (!found || !a || !b) return "";
  const what = waits ? "waits for the weight part" : "saved for backward", whose = waits ? "weight part" : "backward";
  const head = `${what}: ${size(found[2])}\nmade in ${p.name(a)}${a === b ? "" : `, kept for the ${whose} of ${p.name(b)}`}`;
  return [head, keptText(p, [from, to, waits])].filter(text => text).join("\n");
}

// @ts-check
// Shows in the side panel the facts about the selected op or row.
import {el} from "./elements.js";
import {sum} from "./totals.js";
import {bytesOf, duration, measure, size} from "./units.js";

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

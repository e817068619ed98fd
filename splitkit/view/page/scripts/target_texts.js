// @ts-check
// Says what is below the mouse: the texts of tooltips that all pictures have.
import {keptText} from "./crossing.js";
import {sum} from "./totals.js";
import {duration, size} from "./units.js";

/** @typedef {import("./picture.js").Picture<CommonData>} AnyPicture */

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

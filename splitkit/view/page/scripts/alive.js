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
 * @param {import("./joint.js").Halves} p
 * @param {number} step
 */
export function aliveTable(p, step) {
  const {ops, choice, data, timeline} = p, found = aliveAt(choice.memory, step), shown = found.slice(0, LISTED), whole = timeline.bytes[step], op = timeline.ops[step];
  const rows = shown.map(([maker, kind, , , nbytes]) => {
    const isOp = typeof maker === "number", row = el("tr", undefined, isOp ? pressed(() => p.select({op: maker}, true)) : {});
    row.append(el("td", isOp ? ops.name[maker] : maker), el("td", isOp ? ops.within(maker) : ""), el("td", kind), el("td", size(nbytes)), el("td", isOp ? duration(ops.seconds(maker), data.unit) : ""));
    if (isOp) row.title = ops.source(maker);
    return row;
  });
  const rest = whole - sum(shown.map(each => each[4])), box = el("section", undefined, {class: "alive"});
  const name = `alive at step ${step}${op >= 0 ? `, ${ops.name[op]}` : ""}: ${size(whole)}`;
  box.append(el("h3", name), tableOf(name, ["value", "module", "kind", "bytes", "its op takes"], rows));
  if (rest > 0) box.append(remark(`and ${found.length > LISTED ? `${found.length - LISTED} more, ` : ""}what ops take while they run and smaller ones: ${size(rest)}`));
  return box;
}

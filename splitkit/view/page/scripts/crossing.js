// @ts-check
// Finds the values that cross a border, and who reads them.
import {known} from "./totals.js";
import {size} from "./units.js";

/** @typedef {import("./ops.js").Ops} Ops */

/**
 * The readers of each op.
 * @param {Ops} ops
 * @returns {number[][]}
 */
export function readersOf(ops) {
  /** @type {number[][]} */
  const found = ops.name.map(() => []);
  ops.reads.forEach((reads, op) => { for (const read of new Set(reads)) found[read].push(op); });
  return found;
}
/**
 * The ops above a row whose values are read in it or below, the largest first.
 * @param {Ops} ops
 * @param {number[][]} readers
 * @param {number} row
 */
export function crossing(ops, readers, row) {
  const found = [...ops.name.keys()].filter(op => ops.row[op] < row && ops.bytes(op) > 0 && readers[op].some(reader => ops.row[reader] >= row));
  return found.sort((a, b) => ops.bytes(b) - ops.bytes(a));
}
/**
 * Lines about values: name, type, bytes, the module that makes each and those that read it.
 * @param {Ops} ops
 * @param {[number, number][]} values ops and bytes
 * @param {(op: number) => number[]} readers
 */
export function linesOf(ops, values, readers, most = 6) {
  const lines = values.slice(0, most).map(([op, nbytes]) => {
    const by = [...new Set(readers(op).map(reader => ops.within(reader)))], told = `${by.slice(0, 2).join(", ")}${by.length > 2 ? ` and ${by.length - 2} more` : ""}`;
    // of an op with several results only some may be meant
    return `${ops.value(op).includes("], ") ? "up to " : ""}${size(nbytes)}  ${ops.name[op]}  ${ops.value(op)}\n      from ${ops.within(op)}${told ? ` to ${told}` : ""}`;
  });
  return values.length > most ? [...lines, `and ${values.length - most} more`] : lines;
}
/**
 * For each of the saved triples the ops that make what is saved, and bytes; what no op makes counts as its reader's.
 * @param {LadderData} data
 */
export function keptOf({saved, stored, ops: {row}}) {
  /** @type {Map<string, Map<number, number>>} */
  const found = new Map(saved.map(([from, to]) => [`${from} ${to}`, new Map()]));
  for (const [nbytes, maker, savers] of stored) for (const saver of savers) {
    const op = maker < 0 ? saver : maker, of = known(found, `${row[op]} ${row[saver]}`);
    of.set(op, (of.get(op) || 0) + nbytes);
  }
  return [...found.values()].map(of => [...of].sort((a, b) => b[1] - a[1]));
}
/**
 * What a ribbon saves, the largest first.
 * @param {import("./picture.js").Picture<CommonData>} p
 * @param {[number, number, number?]} ribbon the numbers of two items, and 1 for what waits between the parts of backward
 */
export function keptText(p, [from, to, waits]) {
  const [saved, kept] = waits ? [p.waits, p.left] : [p.saved, p.kept], [a, b] = [p.items[from], p.items[to]];
  /** @type {[number, number][]} */
  const found = saved.flatMap(([made, read], i) => p.itemOf[made] === a && p.itemOf[read] === b ? kept[i].filter(([op]) => op >= 0) : []);
  return linesOf(p.ops, found.sort((x, y) => y[1] - x[1]), () => []).join("\n");
}

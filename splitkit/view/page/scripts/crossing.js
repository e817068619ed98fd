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
/**
 * What is saved, with the borders as they are now: a stage that is run again keeps the values of other stages that it
 * reads, up to its first reader; other stages keep what autograd saves.
 * @param {LadderData} data
 * @param {number[]} row the row of each op
 * @param {number[]} stage the stage of each row
 * @param {(stage: number) => boolean} isAgain
 * @returns {{saved: Triple[], kept: [number, number][][]}} the second: for each of the first the ops that make it, and bytes
 */
export function keptNow({saved, kept, taken}, row, stage, isAgain) {
  /** @type {Map<string, [number, number][]>} */
  const found = new Map();
  const keep = (/** @type {number} */ from, /** @type {number} */ to, /** @type {[number, number]} */ of) => {
    const key = `${from} ${to}`;
    if (!found.has(key)) found.set(key, []);
    known(found, key).push(of);
  };
  saved.forEach(([from, to], i) => { if (!isAgain(stage[to])) for (const of of kept[i]) keep(from, to, of); });
  for (const [maker, nbytes, readers] of taken) {
    /** @type {Map<number, number>} stage -> its first reader */
    const first = new Map();
    for (const to of readers.map(op => row[op])) first.set(stage[to], Math.min(to, first.get(stage[to]) ?? to));
    for (const [own, to] of first) if (isAgain(own) && (maker < 0 || stage[row[maker]] !== own)) keep(maker < 0 ? to : row[maker], to, [maker, nbytes]);
  }
  const pairs = [...found].map(([key, of]) => ({at: key.split(" ").map(Number), of})).sort((a, b) => a.at[0] - b.at[0] || a.at[1] - b.at[1]);
  return {saved: pairs.map(({at, of}) => [at[0], at[1], of.reduce((sum, [, nbytes]) => sum + nbytes, 0)]), kept: pairs.map(({of}) => of)};
}

// @ts-check
// Says what lies between forward and backward where backward runs stages again; as splitkit/view/data/ladder.py.
import {known} from "./totals.js";

/**
 * What is saved, with the borders as they are now: a stage that is run again keeps the values of other stages that it
 * reads, up to its first reader; other stages keep what autograd saves.
 * @param {LadderData} data
 * @param {[number, number][][]} kept for each of the triples saved the ops that make it, and bytes
 * @param {number[]} row the row of each op
 * @param {number[]} stage the stage of each row
 * @param {(stage: number) => boolean} isAgain
 * @returns {{saved: Triple[], kept: [number, number][][]}} the second: for each of the first the ops that make it, and bytes
 */
export function keptNow({saved, taken}, kept, row, stage, isAgain) {
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

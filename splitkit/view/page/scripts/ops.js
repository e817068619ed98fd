// @ts-check
// Holds the ops of the graph, and lays out the ops of an open row.
import {known} from "./totals.js";

export const OP = 19, OPW = 178;

/** The ops of the graph, read from the columns that Python sends. */
export class Ops {
  /** @param {OpColumns} told */
  constructor(told) {
    this.told = told;
    this.count = told.name.length;
    this.name = told.name;
    this.row = told.row;
    this.reads = told.reads.map((steps, op) => steps.map(step => op - step));
  }
  /** @param {number} i */
  op(i) { return this.told.sorts[this.told.sort[i]][0]; }
  /** @param {number} i */
  value(i) { return this.told.sorts[this.told.sort[i]][1]; }
  /** @param {number} i */
  bytes(i) { return this.told.sorts[this.told.sort[i]][2]; }
  /** @param {number} i */
  seconds(i) { return this.told.sorts[this.told.sort[i]][3]; }
  /** @param {number} i */
  module(i) { return this.told.modules[this.told.module[i]]; }
  /**
   * The module of an op, in words.
   * @param {number} i
   */
  within(i) { return this.module(i) || "top level"; }
  /** @param {number} i */
  source(i) { return this.told.sources[this.told.source[i]]; }
  /**
   * Find the ops that have the text in their op, name, module or row.
   * @param {string} text
   * @param {RowData[]} rows
   */
  find(text, rows) {
    const has = (/** @type {string} */ word) => word.toLowerCase().includes(text), sorts = this.told.sorts.map(sort => has(sort[0])), modules = this.told.modules.map(has), named = rows.map(row => has(row.name));
    return [...this.name.keys()].filter(i => sorts[this.told.sort[i]] || modules[this.told.module[i]] || named[this.row[i]] || has(this.name[i]));
  }
}
/**
 * Lay out ops in layers, as Sugiyama's method does: each op in the layer of its longest path from above, then moved
 * down to just above its first reader, so that edges are short.
 * @param {number[]} ops
 * @param {number[][]} reads
 * @returns {Inner}
 */
export function layered(ops, reads) {
  const own = new Set(ops);
  /** @type {Map<number, number>} */
  const depth = new Map();
  /** @type {Map<number, number>} */
  const first = new Map();
  /** @type {Map<number, Box>} */
  const boxes = new Map();
  /** @type {number[]} */
  const used = [];
  for (const op of ops) depth.set(op, 1 + Math.max(-1, ...reads[op].filter(r => own.has(r)).map(r => known(depth, r))));
  for (const op of [...ops].reverse()) {
    const reader = first.get(op);
    if (reader !== undefined) depth.set(op, reader - 1);
    for (const read of reads[op]) first.set(read, Math.min(first.get(read) ?? Infinity, known(depth, op)));
  }
  for (const op of ops) {
    const layer = known(depth, op), column = used[layer] || 0;
    used[layer] = column + 1;
    boxes.set(op, {x: column * (OPW + 10), y: layer * (OP + 9)});
  }
  const wide = Math.max(...used, 1);
  for (const box of boxes.values()) box.x += (wide - used[box.y / (OP + 9)]) * (OPW + 10) / 2;
  return {boxes, width: wide * (OPW + 10) - 10, height: used.length * (OP + 9)};
}

// @ts-check
// Holds the ops of the graph, and the sizes of the ladder and of ops in pixels, before zooming.

export const ROW = 26, GAP = 10, BOX = 220, RIBBONS = 190, LEFT = 170;
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

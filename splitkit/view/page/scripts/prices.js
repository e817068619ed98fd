// @ts-check
// Looks up the costs of any stage of consecutive rows, which Python has computed.
import {sum} from "./totals.js";

/** The costs of stages: bytes are known between marks and for single rows, times for all rows. */
export class Prices {
  /** @param {LadderData} data */
  constructor(data) {
    this.data = data;
    this.place = new Map(data.marks.map((row, i) => [row, i]));
    this.count = data.marks.length - 1;
  }
  /** @param {number} row */
  has(row) { return this.place.has(row); }
  /**
   * Whether backward runs a stage again; new stages are like all stages of the plan, or plain.
   * @param {number} k
   * @param {number} count of stages
   */
  isAgain(k, count) { const {rerun} = this.data; return count === rerun.length ? rerun[k] : rerun.every(again => again); }
  /**
   * @param {number} start
   * @param {number} end
   * @param {boolean} again whether backward runs the stage again
   * @param {number} k the stage, if devices differ
   */
  of(start, end, again, k) {
    const {data} = this, a = this.place.get(start), b = this.place.get(end);
    const at = a !== undefined && b !== undefined ? a * this.count - a * (a - 1) / 2 + b - a - 1 : -1;
    const from = at >= 0 ? again ? data.again : data.stretches : end === start + 1 ? data.alone : null, i = at >= 0 ? at : start;
    const bytes = (/** @type {keyof ByteColumns} */ c) => from ? from[c][i] : NaN, {forward, backward} = this.timesOn(k), over = (/** @type {number[]} */ column) => sum(column.slice(start, end));
    const back = over(backward);
    return this.whole({forward: over(forward), backward: again && back ? back + over(forward) : back, saved: bytes("saved"), temporary: bytes("temporary"), fixed: bytes("fixed")});
  }
  /**
   * The times of all rows on the device of a stage.
   * @param {number} k
   * @returns {{forward: number[]; backward: number[]}}
   */
  timesOn(k) { const {times} = this.data; return times.on ? {forward: times.on.forward[k], backward: times.on.backward[k]} : times; }
  /**
   * @param {StageColumns} s
   * @param {number} k
   */
  at(s, k) { return this.whole({forward: s.forward[k], backward: s.backward[k], saved: s.saved[k], temporary: s.temporary[k], fixed: s.fixed[k]}); }
  /**
   * @param {Omit<Price, "seconds" | "peak">} of
   * @returns {Price}
   */
  whole(of) { return {...of, seconds: of.forward + of.backward, peak: of.fixed + of.saved + of.temporary}; }
  /**
   * The stages between borders; those of the plan itself are as Python computed them from its parts.
   * @param {number[]} borders
   * @param {boolean} shipped
   * @returns {Stage[]}
   */
  stages(borders, shipped) {
    const {data} = this;
    return borders.slice(1).map((end, k) => ({...(shipped ? this.at(data.stages, k) : this.of(borders[k], end, this.isAgain(k, borders.length - 1), k)), start: borders[k], end, down: data.down[end], up: data.up[borders[k]]}));
  }
}

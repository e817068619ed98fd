// @ts-check
// The picture of a training step in stages: forward, backward in one or two parts, what is saved and what waits.
import {linesOf} from "./crossing.js";
import {el, tableOf} from "./elements.js";
import {Ladder} from "./ladder.js";
import {nested} from "./nested.js";
import {sum} from "./totals.js";
import {duration, size} from "./units.js";

/** A ladder of stages whose backward is known op by op. Its borders cannot be moved: Python decides what is saved. */
export class Staged extends Ladder {
  /**
   * @param {StagedData} data
   * @param {Options} options
   */
  constructor(data, options) {
    super(data, options);
    this.staged = data;
    this.late = data.late;
    this.waits = data.waits;
    this.left = data.left;
    /** @type {number[][][]} for each column the ops of each row */
    this.columns = [0, 1, 2].map(() => data.rows.map(() => []));
    data.places.forEach((places, op) => { for (let i = 0; i < places.length; i += 2) this.columns[places[i + 1]][places[i]].push(op); });
    this.opsOf = this.columns[0];
  }
  get divided() { return /** @type {StagedData} */ (this.data).divided; }
  get movable() { return false; }
  get showsBorders() { return true; }
  get offersRecompute() { return false; }
  get whyFixed() { return "Borders cannot be moved here, because what a stage saves is planned for it."; }
  setBorders() {}
  setCount() {}
  moveBorder() {}
  buttons() { return []; }
  makeSlider() {
    const slider = el("input", undefined, {type: "range", min: 1, max: this.data.parts.length, "aria-label": "stages"});
    slider.disabled = true;
    return slider;
  }
  get stages() {
    const {stages} = /** @type {StagedData} */ (this.data);
    return this.prices.stages(this.borders, true).map((stage, k) => ({...stage, seconds: stage.seconds + stages.weight[k]}));
  }
  /** @param {number} k */
  notesOf(k) {
    const {again, waiting} = this.staged.stages;
    return [...(again[k] ? [`${again[k]} ops again`] : []), ...(waiting[k] ? [`${size(waiting[k])} waits`] : [])];
  }
  get backwardName() { return this.divided ? "gradients of inputs" : "backward"; }
  /** @param {number} k */
  moreTimes(k) { return this.divided ? `, of weights ${duration(this.staged.stages.weight[k], this.data.unit)}` : ""; }
  /**
   * @param {number} start
   * @param {number} end
   */
  priceOf(start, end) {
    const {times, saved} = this.staged, over = (/** @type {number[]} */ column) => sum(column.slice(start, end));
    return this.prices.whole({forward: over(times.forward), backward: over(times.backward), weight: over(times.weight), saved: sum(saved.map(([from, , nbytes]) => from >= start && from < end ? nbytes : 0)), temporary: 0, fixed: over(this.staged.weights)});
  }
  /**
   * @param {Item} item
   * @param {0 | 1 | 2} column
   */
  isEmpty(item, column) {
    const {forward, backward, weight} = this.staged.counts;
    return !sum([forward, backward, weight][column].slice(item.start, item.end));
  }
  /** @param {Item} item */
  hatched(item) {
    const {times, counts} = this.staged, over = (/** @type {number[]} */ column) => sum(column.slice(item.start, item.end));
    return over(counts.again) ? Math.max(4, item.w2 * Math.min(1, over(times.again) / (over(times.backward) || 1))) : 0;
  }
  /** @param {number} row */
  mirrored(row) { return nested(this.columns[1][row], this.ops, this.toggled, true); }
  /** @param {number} row */
  deferred(row) { return this.divided ? {...nested(this.columns[2][row], this.ops, this.toggled, true), column: 2} : null; }
  /**
   * @param {number} op
   * @param {Inner} inner
   */
  isRepeated(op, inner) {
    const column = inner.column ?? (inner.up ? 1 : 0), own = this.staged.places[op];
    return own.some((at, i) => i % 2 === 1 && at < column);
  }
  /** @param {Item} item */
  weightsOf(item) { return sum(this.staged.weights.slice(item.start, item.end)); }
  /**
   * @param {number} op
   * @returns {import("./facts.js").Fact[]}
   */
  moreFacts(op) { return [["runs in", this.partsOf(op)]]; }
  /** @returns {import("./elements.js").Entry[]} */
  moreLegend() {
    const {counts} = this.staged, colour = COLOURS[0];
    /** @type {import("./elements.js").Entry[]} */
    const found = sum(counts.again) ? [["hatched", colour, "computed again in backward"]] : [];
    if (this.divided) found.push(["sign", "var(--fg)", "∇x: the part of backward for gradients of inputs; ∇w: for those of weights"]);
    return [...found, ["pale", colour, "a pale box: nothing runs there"]];
  }
  showSide() {
    super.showSide();
    const {stages} = this.staged, {unit} = this.data, time = (/** @type {number} */ seconds) => duration(seconds, unit);
    const rows = this.data.parts.map((part, k) => {
      const row = el("tr"), waits = this.divided ? [el("td", time(stages.weight[k])), el("td", size(stages.waiting[k]))] : [];
      row.append(el("td", part), el("td", time(stages.forward[k])), el("td", time(stages.backward[k])), ...waits, el("td", stages.again[k] ? `${stages.again[k]} ops` : "–"));
      return row;
    });
    const name = "the parts of each stage", table = tableOf(name, ["stage", "forward", ...(this.divided ? ["∇x", "∇w", "waits"] : ["backward"]), "again"], rows);
    this.side.children[1].after(el("h3", name), table);
  }
  /**
   * What crosses a border.
   * @param {number} k the border above stage k
   */
  borderText(k) {
    const {down, up, crossing} = this.staged, row = this.borders[k], lines = (/** @type {[number, number][]} */ values) => linesOf(this.ops, values, () => []);
    const [on, back] = crossing[k - 1];
    return [`stage ${k - 1} to ${k}: ${size(down[row])} of activations ▼, for each microbatch`, ...lines(on), `stage ${k} to ${k - 1}: ${size(up[row])} of gradients ▲`, ...lines(back)].join("\n");
  }
  /** @param {Target} at */
  describe(at) {
    const {op, row, frame} = at, {unit} = this.data;
    if (at.border) return this.borderText(at.border);
    if (op !== undefined) return `${super.describe(at)}\nruns in ${this.partsOf(op)}`;
    if (row === undefined || frame) return super.describe(at);
    const item = this.itemOf[row], {start, end} = item, again = sum(this.staged.counts.again.slice(start, end)), {weight} = this.priceOf(start, end);
    const [head, figures, ...more] = super.describe(at).split("\n");
    const lines = [...(this.divided ? [`gradients of weights ${duration(weight ?? 0, unit)}`] : []), ...(again ? [`${again} ops computed again in backward: ${duration(sum(this.staged.times.again.slice(start, end)), unit)}`] : [])];
    return [head, figures, ...lines, ...more].join("\n");
  }
  /**
   * The parts that compute an op.
   * @param {number} op
   */
  partsOf(op) {
    const names = ["forward", this.divided ? "backward, input part" : "backward", "backward, weight part"], places = this.staged.places[op];
    return places.flatMap((at, i) => i % 2 ? [`${names[at]} of stage ${this.stageOf(places[i - 1])}`] : []).join(", and again in ");
  }
}

// @ts-check
// The picture of a plan in stages: its borders can be moved, and the slider sets the number of stages.
import {el} from "./elements.js";
import {Picture} from "./picture.js";
import {Prices} from "./prices.js";
import {colourOf} from "./drawing.js";
import {readersOf, keptNow} from "./crossing.js";
import {paintBands, paintBorders, showStages, borderText, stageText} from "./stage_side.js";
import {download, planFile} from "./take_home.js";
import {Timeline} from "./timeline.js";
import {sum} from "./totals.js";

/** @typedef {[number[], string, number[]]} Past borders, how they were made, and what was chosen among other steps */

/** What is chosen among other steps at first: the links and recompute of the plan, and no row. */
const AS_IT_IS = [0, 0, -1];

/** @extends {Picture<LadderData>} */
export class Ladder extends Picture {
  /**
   * @param {LadderData} data
   * @param {Options} options
   */
  constructor(data, options) {
    super(data, options, data.ops.name.length);
    this.prices = new Prices(data);
    this.shipped = data.borders;
    this.trains = data.trains;
    this.edges = data.edges;
    /** how the borders were made, if they are not those of the plan */
    this.how = "";
    this.readers = readersOf(this.ops);
    /** @type {Past[]} what was there before, the last at the end */
    this.past = [];
    /** @type {Past[]} what undo has taken back */
    this.future = [];
    /** @type {string | null} the borders before the drag */
    this.dragged = null;
    this.showHistory();
    /** @type {number | null} the number of stages that the user wants and Python still plans */
    this.wanted = null;
    /** the links, recompute and the row that are chosen among other steps */
    this.whatIfChosen = AS_IT_IS;
    /** @type {boolean[]} which stages run again in backward */
    this.runsAgain = [];
    this.keep();
    this.timeline = data.run ? new Timeline(this, data.run) : null;
  }
  get chart() { return this.timeline; }
  get rightRoom() { return this.trains ? 200 : 110; }
  buttons() {
    const text = () => `${JSON.stringify(planFile(this), null, 1)}\n`;
    this.back = el("button", "undo", {title: "Ctrl+Z", onclick: () => this.undo()});
    this.forth = el("button", "redo", {title: "Ctrl+Shift+Z", onclick: () => this.redo()});
    return [this.back, this.forth, el("button", "plan.json", {title: "save the plan with the borders as they are now", onclick: () => download("plan.json", new Blob([text()], {type: "application/json"}))})];
  }
  undo() { this.travel(this.past, this.future); }
  redo() { this.travel(this.future, this.past); }
  /**
   * @param {Past[]} from
   * @param {Past[]} to
   */
  travel(from, to) {
    const last = from.pop();
    if (!last) return;
    to.push([this.borders, this.how, this.whatIfChosen]);
    this.whatIfChosen = last[2];
    this.put(last[0], last[1]);
  }
  beginDrag() { this.dragged = this.borders.join(); }
  endDrag() { this.dragged = null; }
  showHistory() {
    if (this.back) this.back.disabled = !this.past.length;
    if (this.forth) this.forth.disabled = !this.future.length;
  }
  get state() { return {...super.state, borders: this.isShipped ? "" : this.borders.join(), whatif: this.whatIfChosen === AS_IT_IS ? "" : this.whatIfChosen.join()}; }
  /** @param {number[]} chosen the links, recompute and the row */
  chooseWhatIf(chosen) {
    this.past.push([this.borders, this.how, this.whatIfChosen]);
    this.future = [];
    this.whatIfChosen = chosen;
    this.put(this.borders, this.how);
  }
  /** @param {URLSearchParams} told */
  restore(told) {
    super.restore(told);
    const borders = (told.get("borders") || "").split(",").map(Number), rows = this.data.rows.length;
    const fits = borders.length > 1 && borders[0] === 0 && borders.at(-1) === rows && borders.every((row, i) => Number.isInteger(row) && (!i || row > borders[i - 1]) && this.prices.has(row));
    if (fits) this.setBorders(borders);
    const other = this.data.run && this.data.run.whatIf, chosen = (told.get("whatif") || "").split(",").map(Number), [links, again, own] = chosen;
    if (other && chosen.length === 3 && other.links[links] && other.recompute[again] && (own === -1 || other.rows[own])) this.chooseWhatIf(chosen);
  }
  makeSlider() {
    const slider = el("input", undefined, {type: "range", min: 1, max: this.data.even.length, "aria-label": "stages", oninput: () => this.setCount(Number(slider.value))});
    // the number of devices that differ is fixed
    slider.disabled = Boolean(this.data.times?.on);
    return slider;
  }
  asPlanned() { this.setBorders(this.shipped); }
  /** @param {number} count */
  setCount(count) {
    const own = this.shipped.length - 1 === count;
    this.wanted = count;
    // where Python plans, its answer will be drawn
    if (this.options.oncount && this.options.oncount(count, own)) { this.count.textContent = String(count); return; }
    this.wanted = null;
    this.setBorders(own ? this.shipped : this.data.even[count - 1], ", divided evenly here");
  }
  /**
   * @param {number[]} borders
   * @param {string} [how]
   */
  setBorders(borders, how = ", moved by hand") {
    const last = this.past.at(-1), goesOn = this.dragged !== null && last && last[0].join() === this.dragged;
    if (borders.join() !== this.borders.join() && !goesOn) this.past.push([this.borders, this.how, this.whatIfChosen]);
    this.future = [];
    this.put(borders, how);
  }
  /**
   * @param {number[]} borders
   * @param {string} how
   */
  put(borders, how) {
    this.borders = [...borders];
    this.how = how;
    this.keep();
    this.forgetBeyond(borders.length - 1);
    this.layout();
    this.showSide();
    this.showHistory();
    if (this.options.onplan) this.options.onplan(this.borders);
  }
  /** Note what lies between forward and backward, and which stages run again: none without a backward. */
  keep() {
    const {data, ops} = this, isAgain = (/** @type {number} */ k) => this.isAgain(k);
    this.runsAgain = this.stages.map((stage, k) => isAgain(k) && stage.backward > 0);
    const {saved, kept} = data.rerun.includes(true) ? keptNow(data, ops.row, data.rows.map((_, row) => this.stageOf(row)), isAgain) : data;
    this.saved = saved;
    this.kept = kept;
  }
  /**
   * More lines beside a stage.
   * @param {number} k
   * @returns {string[]}
   */
  notesOf(k) { return []; }
  /**
   * More times of a stage, after those of forward and backward.
   * @param {number} k
   */
  moreTimes(k) { return ""; }
  /**
   * What a stage holds of a microbatch of a step, the largest first, and the bytes of what cannot be told apart: copies of
   * values that it sends, and all of a stage whose values are not those of its rows.
   * @param {Run} run
   * @param {number} k
   * @returns {{values: import("./rank_memory.js").Value[], rest: number}}
   */
  heldIn(run, k) {
    const whole = run.by.units[k][1], values = this.data.held[k], rest = whole - sum(values.map(value => value[2]));
    return run.by.why || rest < 0 ? {values: [], rest: whole} : {values, rest};
  }
  /**
   * The bytes of weights and state of an item.
   * @param {Item} item
   */
  weightsOf(item) { return this.prices.of(item.start, item.end, this.isAgain(this.stageOf(item.start)), this.stageOf(item.start)).fixed; }
  /**
   * More facts about an op.
   * @param {number} op
   * @returns {import("./facts.js").Fact[]}
   */
  moreFacts(op) { return []; }
  /** Why borders cannot be moved, if they cannot. */
  get whyFixed() { return "There are too many stages to move borders."; }
  /**
   * More entries of the legend.
   * @returns {import("./elements.js").Entry[]}
   */
  moreLegend() { return []; }
  /** Whether the page can say what it costs to run stages again in backward. */
  get offersRecompute() { return true; }
  /** @param {number} stage */
  isAgain(stage) { return this.prices.isAgain(stage, this.borders.length - 1); }
  /** The step of the plan; null once borders have moved, since only Python simulates. */
  get run() { return this.isShipped ? this.data.run : null; }
  get stages() { return this.prices.stages(this.borders, this.isShipped); }
  get movable() { return this.borders.every(row => this.prices.has(row)); }
  get isShipped() { return this.borders.join() === this.shipped.join(); }
  /** @param {number} stage */
  partName(stage) { return this.isShipped ? this.data.parts[this.data.rows[this.borders[stage]].part] : String(stage); }
  /**
   * @param {number} start
   * @param {number} end
   */
  priceOf(start, end) {
    const stage = this.stageOf(start), price = this.prices.of(start, end, this.isAgain(stage), stage);
    // in a stage that runs again, so does a row without a backward of its own
    return this.runsAgain[stage] && !price.backward ? {...price, backward: price.forward} : price;
  }
  /** @param {Item} item */
  hatched(item) {
    const {forward, backward} = this.priceOf(item.start, item.end);
    return this.runsAgain[this.stageOf(item.start)] && backward ? forward / backward * item.w2 : 0;
  }
  /** @param {number} row */
  stageOf(row) { let k = 0; while (this.borders[k + 1] <= row) k++; return k; }
  /** @param {number} row */
  stageTarget(row) { return {stage: this.stageOf(row)}; }
  /** @param {Target} at */
  describe(at) { return at.border ? borderText(this, at.border) : at.stage !== undefined ? stageText(this, at.stage) : super.describe(at); }
  /** @param {number} row */
  othersOf(row) { return this.data.beside.map(other => other.rows[row]); }
  /** @param {number} row */
  paintOf(row) { return colourOf(this.stageOf(row)); }
  /** @param {CanvasRenderingContext2D} c */
  bands(c) { paintBands(this, c); }
  /** @param {CanvasRenderingContext2D} c */
  paintStageBorders(c) { paintBorders(this, c); }
  showSide() { showStages(this); }
  /**
   * @param {number} k
   * @param {number | undefined} row
   */
  moveBorder(k, row) {
    const {borders} = this;
    if (row === undefined || !this.prices.has(row) || row <= borders[k - 1] || row >= borders[k + 1] || row === borders[k]) return;
    this.setBorders(borders.map((b, i) => i === k ? row : b));
  }
  /**
   * @param {number} row
   * @param {number} step
   * @returns {[number, number | undefined]}
   */
  neighbour(row, step) {
    const stage = this.stageOf(row), k = stage + 1 < this.borders.length - 1 ? stage + 1 : stage, mark = this.prices.place.get(this.borders[k]);
    return [k, k > 0 && mark !== undefined ? this.data.marks[mark + step] : undefined];
  }
  /** @param {number} y */
  rowNear(y) {
    const {marks} = this.data, far = (/** @type {number} */ row) => Math.abs(this.itemOf[row].y - y);
    let best = marks[1];
    for (const row of marks.slice(1, -1)) if (this.itemOf[row].start === row && far(row) < far(best)) best = row;
    return best;
  }
}

// @ts-check
// The picture of forward and backward of a joint graph: what is saved, and what is recomputed.
import {aliveTable} from "./alive.js";
import {bandTable} from "./bands.js";
import {dashed, heading} from "./drawing.js";
import {el, mark, pressed, remark, tableOf, ARROW, LIMIT, RIBBON, legend} from "./elements.js";
import {factsOfOp, factsOfRow, limitField, showFacts} from "./facts.js";
import {LEFT, RIBBONS} from "./ops.js";
import {nested} from "./nested.js";
import {Picture} from "./picture.js";
import {StepChart} from "./step_chart.js";
import {sum} from "./totals.js";
import {duration, size} from "./units.js";

/** @extends {Picture<JointData>} */
export class Halves extends Picture {
  /**
   * @param {JointData} data
   * @param {Options} options
   */
  constructor(data, options) {
    super(data, options, data.late);
    this.edges = data.edges;
    this.number = data.chosen;
    this.choice = data.choices[this.number];
    /** the ops that backward recomputes */
    this.again = new Set(this.choice.again);
    /** @type {number[]} the saved bytes of each row */
    this.savedOf = [];
    this.take(data.chosen);
    this.timeline = new StepChart(this);
  }
  get chart() { return this.timeline; }
  /**
   * Show one of the plans.
   * @param {number} number
   */
  take(number) {
    const choice = this.choice = this.data.choices[this.number = number];
    this.saved = choice.saved;
    this.kept = choice.kept;
    this.again = new Set(choice.again);
    this.savedOf = this.data.rows.map(() => 0);
    for (const [from, , nbytes] of choice.saved) this.savedOf[from] += nbytes;
  }
  /**
   * @param {number} start
   * @param {number} end
   */
  priceOf(start, end) {
    const over = (/** @type {number[]} */ column) => sum(column.slice(start, end));
    return {forward: over(this.choice.forward), backward: over(this.choice.backward), saved: over(this.savedOf)};
  }
  /** @param {number} number */
  setChoice(number) {
    this.take(number);
    this.layout();
    this.showSide();
  }
  get state() { return this.number === this.data.chosen ? super.state : {...super.state, plan: String(this.number)}; }
  /** @param {URLSearchParams} told */
  restore(told) {
    super.restore(told);
    const number = Number(told.get("plan") ?? this.number);
    if (this.data.choices[number]) this.setChoice(number);
  }
  asPlanned() { this.setChoice(this.data.chosen); }
  makeSlider() {
    const last = this.data.choices.length - 1, slider = el("input", undefined, {type: "range", min: 0, max: last, "aria-label": "memory", oninput: () => this.setChoice(Number(slider.value))});
    slider.disabled = !last;
    return slider;
  }
  /**
   * The number and seconds of the recomputed ops in an item.
   * @param {Item} item
   */
  againIn(item) {
    const ops = this.choice.again.filter(op => this.itemOf[this.ops.row[op]] === item);
    return {count: ops.length, seconds: sum(ops.map(op => this.ops.seconds(op)))};
  }
  /** @param {Item} item */
  hatched(item) {
    const {count, seconds} = this.againIn(item), share = seconds / (this.priceOf(item.start, item.end).backward || 1);
    return count ? Math.min(1, share) * item.w2 : 0;
  }
  /**
   * @param {number} row
   * @returns {Inner}
   */
  mirrored(row) {
    return nested([...this.opsOf[row].filter(op => this.again.has(op)), ...this.lateOf[row]], this.ops, this.toggled, true);
  }
  /** @param {CanvasRenderingContext2D} c */
  bands(c) {
    const half = (/** @type {number} */ x, /** @type {number} */ w, /** @type {string} */ text, /** @type {boolean} */ late) => {
      c.globalAlpha = 0.12;
      c.fillStyle = this.paintOf(0, late);
      c.fillRect(x - 12, -8, w + 24, this.height + 16);
      c.globalAlpha = 1;
      heading(this, c, text, x + w / 2);
    };
    half(LEFT, this.wide, "forward ↓", false);
    half(this.left2, this.wide2, "backward ↑", true);
    const x = LEFT + this.wide + RIBBONS / 2;
    heading(this, c, `saved: ${size(this.choice.bytes)}`, x);
    c.strokeStyle = this.ink.fg;
    c.lineWidth = 1.3;
    dashed(c, x, -8, x, this.height + 8);
  }
  showSide() {
    const {data, side, choice} = this, {memory, unit} = data, plans = data.choices.length;
    this.slider.value = String(this.number);
    this.count.textContent = size(choice.peak);
    this.reset.disabled = this.number === data.chosen;
    const rows = data.choices.map((each, i) => {
      const row = el("tr", undefined, pressed(() => this.setChoice(i)));
      row.append(el("td", String(i)), el("td", size(each.bytes)), el("td", size(each.peak), memory && each.peak > memory ? {class: "bad"} : {}), el("td", [...(each.again.length ? [`${each.again.length} ops, ${duration(each.seconds, unit)}`] : []), ...(each.waits ? [`waits ${duration(each.waits, unit)} for copies`] : [])].join(", ") || "–"));
      if (i === this.number) mark(row);
      return row;
    });
    const name = `${plans === 1 ? "1 plan" : `${plans} plans`} of forward and backward`;
    side.replaceChildren(el("h3", name), tableOf(name, ["plan", "saved", "peak", "recomputed"], rows));
    side.append(limitField(this));
    this.timeline.unfold();
    const step = this.timeline.pinned ?? choice.memory.at;
    side.append(bandTable(this, this.timeline.bands, step, "at this step"), aliveTable(this, step));
    if (this.selected) showFacts(this, this.factsOf(this.selected));
    if (choice.note) side.append(el("h3", "plan"), remark(choice.note));
    side.append(legend(this, [["", COLOURS[0], "forward"], ["", COLOURS[1], "backward"], ["hatched", COLOURS[1], "recomputed in backward"], RIBBON, ARROW, ["dashed", "var(--fg)", "the border of forward and backward"], ...(memory ? [LIMIT] : [])]));
    side.append(el("h3", "help"), remark("Double-click a module to open it; click on the memory chart to see the op that runs there and what is alive. The wheel scrolls, with Ctrl it zooms; dragging moves the picture. Arrow keys select, Enter opens."));
  }
  /**
   * @param {Target} at
   * @returns {import("./facts.js").Fact[]}
   */
  factsOf(at) {
    const {op} = at;
    if (op !== undefined) return [...factsOfOp(this, op), ["runs in", op >= this.late ? "backward" : this.again.has(op) ? "forward, and again in backward" : "forward"]];
    const row = this.rowOf(at), {count, seconds} = this.againIn(this.itemOf[row]);
    return [...factsOfRow(this, row), ["recomputed", count ? `${count} ops, ${duration(seconds, this.data.unit)}` : "nothing"]];
  }
}

// @ts-check
// Draws the bytes that are alive at each step of forward and backward.
import {bandAt, bandsOf, paintBandsOf} from "./bands.js";
import {SMALL, context, level, put} from "./canvas.js";
import {el} from "./elements.js";
import {near} from "./totals.js";
import {size} from "./units.js";

export class StepChart {
  /** @param {import("./joint.js").Halves} picture */
  constructor(picture) {
    this.picture = picture;
    this.w = this.h = 0;
    /** @type {number | null} the step below the mouse */
    this.hover = null;
    /** @type {number | null} the step that was clicked; null stands for the peak */
    this.pinned = null;
    /** @type {StepMemory | null} the data that `ops` (the op of each step, or -1) and `bytes` were decompressed from */
    this.of = null;
    /** @type {number[]} */
    this.ops = [];
    /** @type {number[]} */
    this.bytes = [];
    /** @type {import("./bands.js").Band[]} the bytes by module */
    this.bands = [];
    /** @type {Item[]} the layout that `bands` were made for: folded layers are one band */
    this.items = [];
    /** the band below the mouse, in words */
    this.within = "";
    this.canvas = el("canvas", undefined, {role: "img", "aria-label": "memory at each step of forward and backward"});
    const foot = el("footer");
    picture.root.style.setProperty("--t", "150px");
    foot.append(this.canvas);
    picture.root.append(foot);
    this.canvas.addEventListener("pointermove", e => { this.hover = this.pick(e); this.within = this.bandText(e); picture.draw(); });
    this.canvas.addEventListener("pointerleave", () => { this.hover = null; picture.draw(); });
    this.canvas.addEventListener("click", e => { const step = this.pick(e), op = step === null ? -1 : this.ops[step]; if (step !== null) this.pinned = step; if (op >= 0) picture.select({op}, true); else picture.showSide(); });
  }
  /** Decompress the steps and bytes of the choice; joint_ladder.py describes the form. */
  unfold() {
    const {memory} = this.picture.choice, {items} = this.picture;
    if (this.of === memory && this.items === items) return;
    if (this.of !== memory) this.decompress(memory);
    this.items = items;
    this.bands = bandsOf(this.picture, memory, this.bytes);
  }
  /** @param {StepMemory} memory */
  decompress(memory) {
    this.of = memory;
    this.pinned = null;
    this.ops = [];
    for (let i = 0; i < memory.steps.length; i += 2) for (let k = 0; k < memory.steps[i + 1]; k++) this.ops.push(memory.steps[i] < 0 ? -1 : memory.steps[i] + k);
    let live = 0;
    this.bytes = memory.bytes.flatMap(change => typeof change === "string" ? Array(Number(change)).fill(live) : [live += change]);
  }
  /** @param {number} step */
  x(step) { return 84 + (this.w - 100) * step / Math.max(1, this.bytes.length); }
  paint() { this.paintOn(...context(this.canvas)); }
  /**
   * @param {CanvasRenderingContext2D} c
   * @param {number} w
   * @param {number} h
   */
  paintOn(c, w, h) {
    const {picture, hover} = this, {choice, ink, selected} = picture, {memory} = choice;
    this.unfold();
    Object.assign(this, {w, h});
    c.clearRect(0, 0, w, h);
    const {limit, most} = this, base = h - 20, y = (/** @type {number} */ nbytes) => base - (base - 26) * nbytes / most;
    for (const [name, start, stop] of memory.calls) {
      c.globalAlpha = 0.12;
      c.fillStyle = picture.paintOf(0, name === "backward");
      c.fillRect(this.x(start), 20, this.x(stop) - this.x(start), base - 20);
      c.globalAlpha = 1;
      put(c, name, (this.x(start) + this.x(stop)) / 2, h - 6, SMALL, ink.mut, "center");
    }
    if (this.bytes.length) paintBandsOf(c, this.bands, step => this.x(step), y);
    put(c, "0", 78, base, "10px system-ui", ink.mut, "right");
    put(c, size(most), 78, 30, "10px system-ui", ink.mut, "right");
    if (limit) level(c, this.x(0), this.x(this.bytes.length), y(limit), ink.bad);
    const marks = selected && selected.op !== undefined ? [...this.ops.keys()].filter(step => this.ops[step] === selected.op) : [];
    for (const step of hover === null ? marks : [...marks, hover]) { c.fillStyle = ink.fg; c.fillRect(this.x(step), 20, Math.max(1, this.x(step + 1) - this.x(step)), base - 20); }
    const at = this.x(memory.at + 0.5), left = at > w / 2;
    c.fillStyle = ink.fg;
    c.fillRect(at - 2, y(choice.peak) - 2, 4, 4);
    put(c, this.caption(), at + (left ? -6 : 6), 15, "600 11px system-ui", ink.fg, left ? "right" : "left");
  }
  /** The memory limit, or 0 where it would flatten the chart. */
  get limit() { return near(this.picture.data.memory, Math.max(...this.peaks)); }
  get peaks() { return this.picture.data.choices.map(each => each.peak); }
  /** The bytes at the top of the chart, the same for all choices. */
  get most() { return Math.max(this.limit, ...this.peaks) || 1; }
  /** @param {MouseEvent} e */
  bandText(e) {
    const step = this.pick(e), base = this.h - 20, band = step === null ? undefined : bandAt(this.bands, step, (base - e.offsetY) / (base - 26) * this.most);
    return band && step !== null ? `, of which ${band.name}: ${size(band.bytes[step])}` : "";
  }
  /** The text above the chart: bytes and op below the mouse, or of the peak. */
  caption() {
    const {picture, hover} = this, {peak, memory} = picture.choice, op = this.ops[hover ?? memory.at], name = op >= 0 ? picture.ops.name[op] : "";
    return hover === null ? `peak ${size(peak)}${name ? ` at ${name}` : ""}` : `${size(this.bytes[hover])} at ${name || `step ${hover}`}${this.within}`;
  }
  /** @param {MouseEvent} e */
  pick(e) {
    const step = Math.floor((e.offsetX - 84) / (this.w - 100) * this.bytes.length);
    return step >= 0 && step < this.bytes.length ? step : null;
  }
}

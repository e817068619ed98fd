// @ts-check
// Draws the actions of each rank over time, and its memory.
import {SMALL, context, legible, level, put, shade} from "./canvas.js";
import {colourOf} from "./drawing.js";
import {el} from "./elements.js";
import {heldAt, idleOf, peakTime} from "./step_facts.js";
import {showTip} from "./tooltip.js";
import {near, sum} from "./totals.js";
import {duration, size} from "./units.js";

export class Timeline {
  /**
   * @param {import("./ladder.js").Ladder} ladder
   * @param {Run} planned the step of the plan itself
   */
  constructor(ladder, planned) {
    this.ladder = ladder;
    this.planned = planned;
    this.w = this.h = this.high = 0;
    /** @type {number | null} the microbatch below the mouse */
    this.microbatch = null;
    this.canvas = el("canvas", undefined, {role: "img", "aria-label": "what each rank computes when, and its memory"});
    const foot = el("footer");
    this.tip = el("div", "", {class: "tip"});
    foot.append(this.canvas, this.tip);
    ladder.root.append(foot);
    this.canvas.addEventListener("pointermove", e => { const hit = this.pick(e); this.microbatch = hit ? hit[3] : null; ladder.hover(hit ? {stage: hit[2]} : null); ladder.draw(); showTip(this.tip, foot, this.describe(e, hit), e); });
    this.canvas.addEventListener("pointerleave", () => { this.microbatch = null; this.tip.style.display = "none"; ladder.hover(null); ladder.draw(); });
    this.canvas.addEventListener("click", e => { const hit = this.pick(e); if (hit) ladder.select({stage: hit[2]}, true); });
  }
  get run() { return this.ladder.run; }
  /**
   * What the tooltip says of an action, or of the memory of a rank beside one.
   * @param {MouseEvent} e
   * @param {TimedAction | null} hit
   */
  describe(e, hit) {
    const {run} = this, rank = hit ? hit[0] : Math.floor((e.offsetY - 24) / this.high), at = this.secondsAt(e.offsetX);
    if (!run || rank < 0 || rank >= run.ranks || at < 0 || at > run.seconds) return "";
    const time = (/** @type {number} */ seconds) => duration(seconds, run.unit), held = `rank ${rank} holds ${size(heldAt(run, rank, hit ? hit[4] : at))} ${hit ? "when it starts" : `at ${time(at)}`}; its peak is ${size(run.peaks[rank])}, at ${time(peakTime(run, rank))}`;
    if (!hit) return held;
    const [, kind, stage, microbatch, start, end] = hit, name = {F: "forward", B: "backward", I: "backward: gradients of inputs", W: "backward: gradients of weights"}[kind];
    return `${name} of microbatch ${microbatch}, stage ${this.ladder.partName(stage)}\nstarts at ${time(start)}, takes ${time(end - start)}\n${held}`;
  }
  /** @param {number} seconds */
  x(seconds) { return 70 + (this.w - 160) * seconds / (this.run || this.planned).seconds; }
  /** @param {number} x */
  secondsAt(x) { return (x - 70) / (this.w - 160) * (this.run || this.planned).seconds; }
  /** @param {number} rank */
  y(rank) { return 24 + rank * this.high; }
  paint() {
    const {ladder, run} = this;
    // the height depends on the number of ranks
    if (run) ladder.root.style.setProperty("--t", `${Math.min(260, 46 + 40 * run.ranks)}px`);
    const [c, w, h] = context(this.canvas), {ink} = ladder;
    c.clearRect(0, 0, w, h);
    if (!run) return put(c, `${this.planned.name} cannot be simulated here for these stages; “as planned” shows the step of the plan itself`, 70, h / 2, "12px system-ui", ink.mut);
    Object.assign(this, {w, h, high: (h - 44) / run.ranks});
    const idle = idleOf(run), share = (/** @type {"warmup" | "waiting" | "tail"} */ kind) => (100 * sum(idle.map(of => of[kind])) / (run.ranks * run.seconds || 1)).toFixed(1);
    put(c, `${run.name} of ${run.microbatches} microbatches: step ${duration(run.seconds, run.unit)}, bubble ${(100 * run.bubble).toFixed(1)} % = warm-up ${share("warmup")} + waiting ${share("waiting")} + tail ${share("tail")}${ladder.isShipped ? "" : ladder.how}`, 70, 15, "600 11px system-ui", ink.fg);
    for (const event of run.events) this.box(c, event);
    for (let rank = 0; rank < run.ranks; rank++) this.held(c, run, rank, w);
    put(c, "0", this.x(0), h - 6, "10px system-ui", ink.mut);
    put(c, duration(run.seconds, run.unit), this.x(run.seconds), h - 6, "10px system-ui", ink.mut, "right");
  }
  /**
   * Draw an action.
   * @param {CanvasRenderingContext2D} c
   * @param {TimedAction} event
   */
  box(c, [rank, kind, stage, microbatch, start, end]) {
    const x = this.x(start), wide = Math.max(0.5, this.x(end) - x), y = this.y(rank), colour = colourOf(stage);
    c.globalAlpha = (this.microbatch !== null && this.microbatch !== microbatch ? 0.15 : 1) * (kind === "F" ? 0.55 : kind === "W" ? 0.75 : 1);
    c.fillStyle = colour;
    c.fillRect(x, y, wide, this.high * 0.5);
    c.globalAlpha = 1;
    if (wide > 12) put(c, String(microbatch), x + wide / 2, y + this.high * 0.25 + 4, "10px system-ui", kind !== "F" ? legible(colour) : this.ladder.root.classList.contains("dark") ? "#fff" : "#10151c", "center");
  }
  /**
   * Draw the memory of a rank.
   * @param {CanvasRenderingContext2D} c
   * @param {Run} run
   * @param {number} rank
   * @param {number} w
   */
  held(c, run, rank, w) {
    const {memory} = this.ladder.data, {ink} = this.ladder, limit = near(memory, Math.max(...run.peaks)), most = Math.max(limit, ...run.peaks) || 1;
    const base = this.y(rank) + this.high * 0.95, top = this.y(rank) + this.high * 0.55, y = (/** @type {number} */ nbytes) => base - (base - top) * nbytes / most;
    put(c, `rank ${rank}`, 64, this.y(rank) + this.high * 0.25 + 4, SMALL, ink.mut, "right");
    c.beginPath();
    c.moveTo(this.x(0), base);
    let now = run.memory[rank][0][1];
    for (const [seconds, nbytes] of run.memory[rank]) {
      c.lineTo(this.x(seconds), y(now));
      c.lineTo(this.x(seconds), y(nbytes));
      now = nbytes;
    }
    c.lineTo(this.x(run.seconds), y(now));
    c.lineTo(this.x(run.seconds), base);
    shade(c, ink.rib);
    put(c, "▾", this.x(peakTime(run, rank)), y(run.peaks[rank]) + 1, "11px system-ui", ink.fg, "center");
    if (limit) level(c, this.x(0), this.x(run.seconds), y(limit), ink.bad);
    put(c, `peak ${size(run.peaks[rank])}`, w - 2, base, SMALL, memory && run.peaks[rank] > memory ? ink.bad : ink.mut, "right");
  }
  /** @param {MouseEvent} e */
  pick(e) {
    return this.run && this.run.events.find(([rank, , , , start, end]) => e.offsetX >= this.x(start) && e.offsetX <= this.x(end) && e.offsetY >= this.y(rank) && e.offsetY <= this.y(rank) + this.high) || null;
  }
}

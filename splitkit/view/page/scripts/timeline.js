// @ts-check
// Draws the actions of each rank over time, and its memory.
import {bandAt, paintBandsOf} from "./bands.js";
import {SMALL, context, legible, level, put} from "./canvas.js";
import {colourOf} from "./drawing.js";
import {el, showTip} from "./elements.js";
import {colourOfChange, heldWhenRun, highest, measuredText, measuredTitle, ownScale, spanOf} from "./measured.js";
import {bandsOfRank, pointAt} from "./rank_memory.js";
import {COMPUTATIONS, heldAt, idleOf, memoryOf, peakTime} from "./step_facts.js";
import {near, sum} from "./totals.js";
import {duration, size} from "./units.js";

/** The pixels that the memory of one rank has on top of those of all ranks: of the one that the side panel tells about. */
const LENS = 72;

export class Timeline {
  /**
   * @param {import("./ladder.js").Ladder} ladder
   * @param {Run} planned the step of the plan itself
   */
  constructor(ladder, planned) {
    this.ladder = ladder;
    this.planned = planned;
    this.w = this.h = this.high = 0;
    /** the rank whose memory has more room */
    this.told = 0;
    /** @type {number | null} the microbatch below the mouse */
    this.microbatch = null;
    /** @type {(Instant & {seconds: number}) | null} where the user wants to know what is alive; null stands for the highest peak */
    this.pinned = null;
    this.canvas = el("canvas", undefined, {role: "img", tabindex: 0, "aria-label": "what each rank computes when, and its memory; arrow keys go to other instants and ranks"});
    const foot = el("footer");
    this.tip = el("div", "", {class: "tip"});
    foot.append(this.canvas, this.tip);
    ladder.root.append(foot);
    this.canvas.addEventListener("pointermove", e => { const hit = this.pick(e); this.microbatch = hit ? hit[3] : null; ladder.hover(hit ? {stage: hit[2]} : null); ladder.draw(); showTip(this.tip, foot, this.describe(e, hit), e); });
    this.canvas.addEventListener("pointerleave", () => { this.microbatch = null; this.tip.style.display = "none"; ladder.hover(null); ladder.draw(); });
    this.canvas.addEventListener("click", e => { const hit = this.pick(e); if (this.isMemory(e)) this.pin(this.rankAt(e), this.secondsAt(e.offsetX)); else if (hit) ladder.select({stage: hit[2]}, true); });
    this.canvas.addEventListener("keydown", e => this.pressKey(e));
  }
  get run() { return this.ladder.run; }
  /**
   * The instant that the side panel tells about.
   * @returns {Instant | null}
   */
  get instant() {
    const {run, pinned} = this;
    if (!run || pinned) return run && pinned;
    const rank = run.peaks.indexOf(Math.max(...run.peaks));
    return {run, rank, i: run.by.highest[rank]};
  }
  /**
   * Tell what is alive on a rank.
   * @param {number} rank
   * @param {number} seconds
   * @param {number} [i] the point of the memory; by default the last one until then
   */
  pin(rank, seconds, i) {
    const {ladder, run} = this;
    if (!run || seconds < 0 || seconds > run.seconds) return;
    const point = i ?? pointAt(run, rank, seconds);
    this.pinned = {run, rank, i: point, seconds};
    ladder.said.textContent = `rank ${rank} at ${duration(seconds, run.unit)}: ${size(memoryOf(run)[rank][point][1])}`;
    ladder.showSide();
    ladder.draw();
  }
  /** @param {KeyboardEvent} e */
  pressKey(e) {
    const at = this.instant, step = e.key === "ArrowRight" ? 1 : e.key === "ArrowLeft" ? -1 : 0, down = e.key === "ArrowDown" ? 1 : e.key === "ArrowUp" ? -1 : 0;
    if (!at || (!step && !down && e.key !== "Escape")) return;
    e.preventDefault();
    const {run} = at, points = run.by.points[at.rank], i = Math.max(0, Math.min(points.length - 1, at.i + step)), rank = Math.max(0, Math.min(run.ranks - 1, at.rank + down));
    if (step || down) return down ? this.pin(rank, points[at.i][0]) : this.pin(rank, points[i][0], i);
    this.pinned = null;
    this.ladder.showSide();
    this.ladder.draw();
  }
  /**
   * What the tooltip says of an action, or of the memory of a rank beside one.
   * @param {MouseEvent} e
   * @param {TimedAction | null} hit
   */
  describe(e, hit) {
    const {run} = this, rank = hit ? hit[0] : this.rankAt(e), at = this.secondsAt(e.offsetX);
    if (!run || rank < 0 || rank >= run.ranks || at < 0 || (!hit && at > run.seconds)) return "";
    if (hit && run.measured && this.isMeasured(e, rank)) return measuredText(run, run.measured, run.events.indexOf(hit), this.ladder.partName(hit[2]));
    const onAction = hit && !this.isMemory(e), time = (/** @type {number} */ seconds) => duration(seconds, run.unit), held = `rank ${rank} holds ${size(heldAt(run, rank, onAction ? hit[4] : at))} ${onAction ? "when it starts" : `at ${time(at)}`}; its peak is ${size(run.peaks[rank])}, at ${time(peakTime(run, rank))}`;
    if (!onAction) return `${held}${this.bandText(e, run, rank, at)}`;
    const [, kind, stage, microbatch, start, end] = hit;
    const exchanges = this.exchangesOf(stage, kind), spent = exchanges.length ? `, ${time(sum(exchanges.map(([from, to]) => to - from)))} of it in ${exchanges.length} collectives` : "";
    return `${COMPUTATIONS[kind]} of microbatch ${microbatch}, stage ${this.ladder.partName(stage)}\nstarts at ${time(start)}, takes ${time(end - start)}${spent}\n${held}`;
  }
  /**
   * When an action's collectives start and end, in seconds from its start.
   * @param {number} stage
   * @param {string} kind
   */
  exchangesOf(stage, kind) { return (this.run && this.run.exchanges[stage] || {})[kind] || []; }
  /**
   * Whether the mouse is where measured actions of a rank are, or would be.
   * @param {MouseEvent} e
   * @param {number} rank
   */
  isMeasured(e, rank) {
    const below = e.offsetY - this.y(rank) - this.high * this.share;
    return below > 0 && below <= this.high * this.share;
  }
  /** The seconds from the left edge to the right. */
  get span() { return spanOf(this.run || this.planned); }
  /** The share of a rank's height that the simulated actions take; measured ones take as much below them. */
  get share() { return this.run && this.run.measured ? 0.32 : 0.5; }
  /** @param {number} seconds */
  x(seconds) { return 70 + (this.w - 160) * seconds / this.span; }
  /** @param {number} x */
  secondsAt(x) { return (x - 70) / (this.w - 160) * this.span; }
  /** @param {number} rank */
  y(rank) { return 24 + rank * this.high + (rank > this.told ? LENS : 0); }
  /**
   * The rank at the mouse; -1 above the first, and one too many below the last.
   * @param {MouseEvent} e
   */
  rankAt(e) {
    const {run} = this;
    let rank = e.offsetY < 24 ? -1 : 0;
    while (run && rank >= 0 && rank < run.ranks && e.offsetY >= this.y(rank + 1)) rank++;
    return rank;
  }
  /**
   * The top and the foot of a rank's memory.
   * @param {number} rank
   */
  lane(rank) {
    const y = this.y(rank), {high} = this;
    return [y + high * (this.run && this.run.measured ? 0.68 : 0.55), y + high * 0.95 + (rank === this.told ? LENS : 0)];
  }
  /** @param {MouseEvent} e */
  isMemory(e) {
    const {run} = this, rank = this.rankAt(e);
    return !!run && rank >= 0 && rank < run.ranks && e.offsetY >= this.lane(rank)[0];
  }
  /**
   * The bytes at the top of each rank's memory.
   * @param {Run} run
   */
  most(run) { return Math.max(near(this.ladder.data.memory, Math.max(...run.peaks)), ...run.peaks, highest(run)) || 1; }
  /**
   * @param {MouseEvent} e
   * @param {Run} run
   * @param {number} rank
   * @param {number} seconds
   */
  bandText(e, run, rank, seconds) {
    const [top, base] = this.lane(rank), i = pointAt(run, rank, seconds), band = bandAt(bandsOfRank(this.ladder, run, rank), i, (base - e.offsetY) / (base - top) * this.most(run));
    return `${band ? `\nof which ${band.name}${band.kind && `, ${band.kind}`}: ${size(band.bytes[i])}` : ""}\nclick to list what is alive then`;
  }
  paint() {
    const {ladder, run} = this;
    // the height depends on the number of ranks
    if (run) ladder.root.style.setProperty("--t", `${LENS + (run.measured ? Math.min(400, 60 + 62 * run.ranks) : Math.min(260, 46 + 40 * run.ranks))}px`);
    this.paintOn(...context(this.canvas));
  }
  /**
   * @param {CanvasRenderingContext2D} c
   * @param {number} w
   * @param {number} h
   */
  paintOn(c, w, h) {
    const {ladder, run} = this, {ink} = ladder;
    c.clearRect(0, 0, w, h);
    if (!run) return put(c, `${this.planned.name} was simulated for the stages of the plan; “as planned” shows its step`, 70, h / 2, "12px system-ui", ink.mut);
    this.told = this.instant ? this.instant.rank : 0;
    Object.assign(this, {w, h, high: (h - LENS - 24 - (run.measured ? 34 : 20)) / run.ranks});
    const idle = idleOf(run), share = (/** @type {"warmup" | "waiting" | "tail"} */ kind) => (100 * sum(idle.map(of => of[kind])) / (run.ranks * run.seconds || 1)).toFixed(1);
    const brief = `${run.name}: step ${duration(run.seconds, run.unit)}, bubble ${(100 * run.bubble).toFixed(1)} %`;
    const whole = `${brief.replace(":", ` of ${run.microbatches} microbatches:`)} = warm-up ${share("warmup")} + waiting ${share("waiting")} + tail ${share("tail")}${ladder.isShipped ? "" : ladder.how}`;
    c.font = "600 11px system-ui";
    put(c, c.measureText(whole).width < w - 70 ? whole : brief, Math.max(4, Math.min(70, w - c.measureText(brief).width)), 15, c.font, ink.fg);
    for (const event of run.events) this.box(c, event);
    if (run.measured) this.paintMeasured(c, run, run.measured);
    for (let rank = 0; rank < run.ranks; rank++) this.held(c, run, rank, w);
    put(c, "0", this.x(0), h - 6, "10px system-ui", ink.mut);
    put(c, duration(this.span, run.unit), this.x(this.span), h - 6, "10px system-ui", ink.mut, "right");
  }
  /**
   * What is written on an action: its microbatch, and before it its stage where ranks have several.
   * @param {number} stage
   * @param {number} microbatch
   */
  nameOf(stage, microbatch) { return this.planned.stages > this.planned.ranks ? `${stage}·${microbatch}` : String(microbatch); }
  /**
   * Draw an action.
   * @param {CanvasRenderingContext2D} c
   * @param {TimedAction} event
   */
  box(c, [rank, kind, stage, microbatch, start, end]) {
    const colour = colourOf(stage), ink = kind !== "F" ? legible(colour) : this.ladder.root.classList.contains("dark") ? "#fff" : "#10151c";
    c.globalAlpha = kind === "F" ? 0.55 : kind === "W" ? 0.75 : 1;
    const foot = this.y(rank) + this.high * this.share;
    this.block(c, this.nameOf(stage, microbatch), microbatch, start, end, this.y(rank), this.high * this.share, colour, ink);
    c.fillStyle = this.ladder.ink.fg;
    // only where they can be told apart from the action
    if (this.x(end) - this.x(start) >= 4) for (const [from, to] of this.exchangesOf(stage, kind)) c.fillRect(this.x(start + from), foot - 4, Math.max(0.5, this.x(start + to) - this.x(start + from)), 4);
  }
  /**
   * Draw a block with its name, paler where the mouse is on another microbatch; at the opacity of the canvas, which is 1 then.
   * @param {CanvasRenderingContext2D} c
   * @param {string} name
   * @param {number} microbatch
   * @param {number} start in seconds of the chart
   * @param {number} end
   * @param {number} top
   * @param {number} high
   * @param {string} colour
   * @param {string} ink
   */
  block(c, name, microbatch, start, end, top, high, colour, ink) {
    const x = this.x(start), wide = Math.max(0.5, this.x(end) - x);
    if (this.microbatch !== null && this.microbatch !== microbatch) c.globalAlpha *= 0.15;
    c.fillStyle = colour;
    c.fillRect(x, top, wide, high);
    c.globalAlpha = 1;
    if (wide > 6 * name.length + 5) put(c, name, x + wide / 2, top + high / 2 + 4, "10px system-ui", ink, "center");
  }
  /**
   * Draw what the ranks did, below what was simulated: coloured by how much longer or shorter it took.
   * @param {CanvasRenderingContext2D} c
   * @param {Run} run
   * @param {MeasuredRun} measured
   */
  paintMeasured(c, run, measured) {
    const scale = ownScale(run, measured), high = this.high * this.share, {ink} = this.ladder;
    put(c, measuredTitle(run, measured), 70, this.h - 19, "600 11px system-ui", ink.fg);
    measured.times.forEach(([start, end], i) => {
      const [rank, , stage, microbatch] = run.events[i], colour = colourOfChange(run, measured, i);
      this.block(c, this.nameOf(stage, microbatch), microbatch, start / scale, end / scale, this.y(rank) + high + 1, high - 1, colour, legible(colour));
    });
    for (let rank = 0; rank < run.ranks; rank++) put(c, "measured", 64, this.y(rank) + high * 1.5 + 4, "10px system-ui", ink.mut, "right");
  }
  /**
   * Draw the memory of a rank.
   * @param {CanvasRenderingContext2D} c
   * @param {Run} run
   * @param {number} rank
   * @param {number} w
   */
  held(c, run, rank, w) {
    const {memory} = this.ladder.data, {ink} = this.ladder, limit = near(memory, Math.max(...run.peaks)), most = this.most(run), [top, base] = this.lane(rank), at = this.instant;
    const y = (/** @type {number} */ nbytes) => base - (base - top) * nbytes / most, points = run.by.points[rank];
    put(c, `rank ${rank}`, 64, this.y(rank) + this.high * this.share / 2 + 4, SMALL, ink.mut, "right");
    const left = this.x(0), scale = (this.x(run.seconds) - left) / (run.seconds || 1);
    // modules are told apart only where there is room
    paintBandsOf(c, bandsOfRank(this.ladder, run, rank, rank !== this.told), i => left + scale * (i < points.length ? points[i][0] : run.seconds), y);
    if (at && at.rank === rank) { c.fillStyle = ink.fg; c.fillRect(this.x(points[at.i][0]) - 0.5, top - 4, 1, base - top + 4); }
    put(c, "▾", this.x(peakTime(run, rank)), y(run.peaks[rank]) + 1, "11px system-ui", ink.fg, "center");
    if (run.measured && run.measured.memory.length) {
      const ran = heldWhenRun(run, run.measured, rank);
      c.beginPath();
      let now = ran[0][1];
      for (const [seconds, nbytes] of ran) {
        c.lineTo(this.x(seconds), y(now));
        c.lineTo(this.x(seconds), y(nbytes));
        now = nbytes;
      }
      c.strokeStyle = ink.fg;
      c.lineWidth = 1;
      c.stroke();
    }
    if (limit) level(c, this.x(0), this.x(run.seconds), y(limit), ink.bad);
    put(c, `peak ${size(run.peaks[rank])}`, w - 2, base, SMALL, memory && run.peaks[rank] > memory ? ink.bad : ink.mut, "right");
  }
  /** @param {MouseEvent} e */
  pick(e) {
    const {run} = this;
    if (!run) return null;
    const rank = this.rankAt(e), {measured} = run, ran = measured && this.isMeasured(e, rank) ? measured : null, scale = ran ? ownScale(run, ran) : 1;
    return run.events.find(([own, , , , begin, stop], i) => {
      const [start, end] = ran ? ran.times[i] : [begin, stop];
      return own === rank && e.offsetX >= this.x(start / scale) && e.offsetX <= this.x(end / scale);
    }) || null;
  }
}

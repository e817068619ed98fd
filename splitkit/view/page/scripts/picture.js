// @ts-check
// What the pictures of stages and of forward and backward share: rows that open into ops, selection, search, zoom.
import {context} from "./canvas.js";
import {paintOtherPlans, paintBox, paintRibbons, paintSkips} from "./drawing.js";
import {el, surroundedByDark} from "./elements.js";
import {BOX, GAP, LEFT, RIBBONS, ROW, OPW, Ops} from "./ops.js";
import {READABLE, arrange, fitInto, reserve, scrolled} from "./framing.js";
import {listen} from "./input.js";
import {nested} from "./nested.js";
import {svgOf} from "./svg_context.js";
import {download, flattened} from "./take_home.js";
import {targetText} from "./facts.js";
import {known} from "./totals.js";

/** @template {CommonData} D */
export class Picture {
  /**
   * @param {D} data
   * @param {Options} options
   * @param {number} late the first op of backward
   */
  constructor(data, options, late) {
    this.data = data;
    this.options = options;
    /** the memory limit that Python sent */
    this.shippedLimit = data.memory;
    this.late = late;
    this.ops = new Ops(data.ops);
    /** @type {Set<number>} the open rows, the last opened at the end */
    this.open = new Set();
    /** @type {Set<string>} the modules inside rows that are not open or closed as they were at first */
    this.toggled = new Set();
    this.folded = data.rows.length > 40;
    this.zoom = 1;
    this.x = this.y = this.pending = 0;
    /** whether the user has neither moved nor zoomed it */
    this.untouched = true;
    /** @type {Target | null} */
    this.selected = null;
    /** @type {Target | null} */
    this.hovered = null;
    /** @type {number[] | null} */
    this.query = null;
    /** @type {Set<number> | null} */
    this.found = null;
    this.at = -1;
    /** whether there is a backward */
    this.trains = true;
    /** the first row of each stage, and the number of rows */
    this.borders = data.borders;
    /** @type {Triple[]} */
    this.saved = [];
    /** @type {[number, number][][]} for each of `saved` the ops that make what is saved, or -1 for an input, and bytes */
    this.kept = [];
    /** @type {Triple[]} */
    this.edges = [];
    /** @type {Triple[]} the ribbons as they are drawn: from item, to item, bytes */
    this.ribbons = [];
    this.legendIsOpen = true;
    /** @type {Item[]} */
    this.items = [];
    /** @type {Item[]} */
    this.itemOf = [];
    this.height = this.wide = this.wide2 = this.wide3 = this.right = 0;
    /** @type {Triple[]} what waits between the parts of backward, where it has two, as `saved` */
    this.waits = [];
    /** @type {[number, number][][]} for each of `waits`, as `kept` */
    this.left = [];
    /** @type {Triple[]} as `ribbons` */
    this.waitingRibbons = [];
    this.seen = {top: 0, bottom: 0};
    /** @type {Ink} */
    this.ink = {fg: "", mut: "", bg: "", bad: "", rib: ""};
    /** @type {number[][]} */
    this.opsOf = data.rows.map(() => []);
    /** @type {number[][]} */
    this.lateOf = data.rows.map(() => []);
    this.ops.row.forEach((row, op) => (op < late ? this.opsOf : this.lateOf)[row].push(op));
    this.root = el("div", undefined, {class: `sk${options.dark ?? surroundedByDark() ? " dark" : ""}`});
    if (options.height) this.root.style.setProperty("--h", `${options.height}px`);
    this.count = el("b");
    this.slider = this.makeSlider();
    this.reset = el("button", "as planned", {onclick: () => this.asPlanned()});
    this.fold = el("button", "", {onclick: () => { this.folded = !this.folded; this.layout(); this.fit(); this.showSide(); }});
    const wanted = "search op or module";
    this.save = el("button", "PNG", {title: "save what is seen as PNG", onclick: () => flattened(this.root, this.ink.bg).toBlob(blob => { if (blob) download("splitkit.png", blob); })});
    this.search = el("input", undefined, {type: "search", placeholder: wanted, "aria-label": wanted, oninput: () => this.find(this.search.value), onkeydown: e => { if (e.key === "Enter") this.nextHit(); }});
    this.hits = el("span", "", {class: "mut", "aria-live": "polite"});
    this.canvas = el("canvas", undefined, {tabindex: 0, role: "img", "aria-label": "forward, backward and the borders of the plan; arrow keys select, Enter opens"});
    this.tip = el("div", "", {class: "tip"});
    this.main = el("main");
    this.main.append(this.canvas, this.tip);
    this.side = el("aside");
    /** what a screen reader says of the selection */
    this.said = el("p", "", {class: "said", "aria-live": "polite"});
    /** what is printed in place of the canvases: a canvas would be scaled from the size of the screen */
    this.paper = el("div", undefined, {class: "paper"});
    this.onprint = () => this.paper.replaceChildren(new DOMParser().parseFromString(svgOf(this), "image/svg+xml").documentElement);
    this.root.append(this.head(), this.main, this.paper, this.side, this.said);
    this.observer = new ResizeObserver(() => { arrange(this); this.untouched ? this.fit() : this.draw(); });
  }
  head() {
    const {title} = this.data, head = el("header"), label = el("label", `${this.slider.getAttribute("aria-label")} `);
    label.append(this.slider, " ", this.count);
    head.append(el("b", "splitkit"), el("span", `${title}${title ? " · " : ""}${this.ops.count} ops`, {class: "mut"}), label, this.reset, this.fold,
      ...this.buttons(), el("button", "fit", {onclick: () => this.fit(0)}), this.save, el("button", "SVG", {title: "save the whole picture as SVG", onclick: () => download("splitkit.svg", new Blob([svgOf(this)], {type: "image/svg+xml"}))}), this.search, this.hits,
      el("button", "◐", {title: "dark or light", "aria-label": "dark or light", onclick: () => { this.root.classList.toggle("dark"); this.draw(); }}));
    return head;
  }
  /**
   * Put the picture into an element of a page.
   * @param {HTMLElement} parent
   */
  mount(parent) {
    parent.append(this.root);
    listen(this);
    for (const box of [this.root, this.main]) this.observer.observe(box);
    addEventListener("beforeprint", this.onprint);
    this.layout();
    arrange(this);
    this.fit();
    this.showSide();
    return this;
  }
  destroy() { this.observer.disconnect(); removeEventListener("beforeprint", this.onprint); cancelAnimationFrame(this.pending); this.root.remove(); }

  // ---- where the columns are: forward, backward, and the second part of backward where it has two
  /** Whether backward has two columns. */
  get divided() { return false; }
  /** The left edge of backward. */
  get left2() { return LEFT + this.wide + RIBBONS; }
  /** The left edge of the second part of backward. */
  get left3() { return this.left2 + this.wide2 + RIBBONS; }

  // ---- what the pictures override
  /**
   * More buttons of the head.
   * @returns {HTMLElement[]}
   */
  buttons() { return []; }
  undo() {}
  redo() {}
  // undo takes a whole drag back
  beginDrag() {}
  endDrag() {}
  /**
   * What the address of the page tells.
   * @returns {Record<string, string>}
   */
  get state() { return {limit: this.data.memory === this.shippedLimit ? "" : String(this.data.memory ?? "none"), open: [...this.open].join(), inside: [...this.toggled].join()}; }
  /**
   * Show what an address tells, as far as it fits this picture.
   * @param {URLSearchParams} told
   */
  restore(told) {
    for (const row of (told.get("open") || "").split(",").map(Number)) if (told.get("open") && this.opsOf[row]) this.open.add(row);
    const limit = told.get("limit");
    if (limit === "none" || Number(limit) > 0) this.setLimit(limit === "none" ? null : Number(limit));
    this.toggled = new Set((told.get("inside") || "").split(",").filter(key => key));
    this.layout();
  }
  /** @returns {HTMLInputElement} */
  makeSlider() { return el("input"); }
  asPlanned() {}
  showSide() {}
  /** @returns {Chart | null} */
  get chart() { return null; }
  /** What the second column computes. */
  get backwardName() { return "backward"; }
  /** Whether borders can be pointed at. */
  get showsBorders() { return this.movable; }
  /** Whether borders can be moved: the costs of all possible stages are known. */
  get movable() { return false; }
  /**
   * The costs of the rows from start to before end.
   * @param {number} start
   * @param {number} end
   * @returns {RowPrice}
   */
  priceOf(start, end) { return {forward: 0, backward: 0, saved: 0}; }
  /** @param {number} row */
  stageOf(row) { return 0; }
  /**
   * The target of a click beside the boxes of a row.
   * @param {number} row
   * @returns {Target | null}
   */
  stageTarget(row) { return null; }
  /**
   * The stage of a row in each plan beside.
   * @param {number} row
   * @returns {number[]}
   */
  othersOf(row) { return []; }
  /** The room at the left for the plans beside. */
  get leftRoom() { return 12 + 38 * this.othersOf(0).length; }
  /** The room at the right for what stands beside the boxes, before zooming. */
  get rightRoom() { return 40; }
  /**
   * The backward ops of a row, drawn upwards; null for a plan in stages, which does not know them.
   * @param {number} row
   * @returns {Inner | null}
   */
  mirrored(row) { return null; }
  /**
   * The ops of a row in the second part of backward.
   * @param {number} row
   * @returns {Inner | null}
   */
  deferred(row) { return null; }
  /**
   * Whether an op of an open row is hatched, because another part has computed it before.
   * @param {number} op
   * @param {Inner} inner
   */
  isRepeated(op, inner) { return !!inner.up && op < this.late; }
  /**
   * Whether nothing runs in a column of an item, which is pale then.
   * @param {Item} item
   * @param {0 | 1 | 2} column
   */
  isEmpty(item, column) { return false; }
  /**
   * The colour of a row's box in forward, or in backward if `late`.
   * @param {number} row
   * @param {boolean} late
   */
  paintOf(row, late) { return COLOURS[late ? 1 : 0]; }
  /**
   * What the tooltip says of what is below the mouse.
   * @param {Target} at
   */
  describe(at) { return targetText(this, at); }
  /**
   * A module inside an open row, in forward or backward.
   * @param {number} row
   * @param {string} key
   */
  frameOf(row, key) { return this.innerOf(this.itemOf[row]).flatMap(([, , inner]) => inner.frames).find(frame => frame.key === key); }
  /**
   * Draw what lies below the boxes.
   * @param {CanvasRenderingContext2D} c
   */
  bands(c) {}
  /** @param {CanvasRenderingContext2D} c */
  paintStageBorders(c) {}
  /**
   * The pixels of an item's backward box that are hatched: the share that is the time of what has been computed before.
   * @param {Item} item
   */
  hatched(item) { return 0; }
  /**
   * @param {number} k the border
   * @param {number | undefined} row the row above which it goes
   */
  moveBorder(k, row) {}
  /**
   * The border that an arrow key moves at a row, and the row that it goes to.
   * @param {number} row
   * @param {number} step
   * @returns {[number, number | undefined]}
   */
  neighbour(row, step) { return [0, undefined]; }
  /**
   * The row that a border snaps to when it is dragged to y.
   * @param {number} y
   */
  rowNear(y) { return -1; }

  // ---- layout: an item is a row, or a run of equal rows of one stage that are folded
  layout() {
    const {rows} = this.data, same = (/** @type {number} */ a, /** @type {number} */ b) => rows[a].kind === rows[b].kind && this.stageOf(a) === this.stageOf(b) && this.othersOf(a).join() === this.othersOf(b).join();
    this.items = [];
    this.itemOf = [];
    let y = 0;
    for (let row = 0, end = 0; row < rows.length; row = end) {
      for (end = row + 1; this.folded && end < rows.length && same(row, end);) end++;
      const item = this.itemAt(row, end, y);
      for (let i = row; i < end; i++) this.itemOf[i] = item;
      this.items.push(item);
      y += item.h + GAP;
    }
    this.height = y - GAP;
    this.wide = Math.max(BOX, ...this.items.map(item => item.w));
    this.wide2 = Math.max(BOX, ...this.items.map(item => item.w2));
    this.wide3 = this.divided ? Math.max(BOX, ...this.items.map(item => item.w3)) : 0;
    this.right = !this.trains ? LEFT + this.wide : this.divided ? this.left3 + this.wide3 : this.left2 + this.wide2;
    reserve(this);
    this.fold.textContent = this.folded ? "unfold" : "fold equal layers";
    if (this.options.onstate) this.options.onstate();
    this.draw();
  }
  /**
   * @param {number} start
   * @param {number} end
   * @param {number} y
   * @returns {Item}
   */
  itemAt(start, end, y) {
    // equal layers stay folded when they open, and show the layer opened last
    const shows = [...this.open].filter(row => row >= start && row < end).at(-1) ?? -1, open = shows >= 0;
    const inner = open ? nested(this.opsOf[shows], this.ops, this.toggled) : null, mirror = open ? this.mirrored(shows) : null, late = open ? this.deferred(shows) : null;
    const wide = (/** @type {Inner | null} */ of) => of ? Math.max(BOX, of.width + 16) : BOX, high = (/** @type {Inner | null} */ of) => of ? of.height : 0;
    return {start, end, shows, y, inner, mirror, late, h: inner ? Math.max(high(inner), high(mirror), high(late)) + ROW + 8 : ROW, w: wide(inner), w2: wide(mirror), w3: wide(late)};
  }
  /** @param {Item} item */
  name(item) {
    const {rows} = this.data, count = item.end - item.start;
    return count === 1 ? rows[item.start].name : `${rows[item.start].name} … ${rows[item.end - 1].name.split(".").pop()}  ×${count}`;
  }
  /**
   * [left, top, inner graph] of an open item: forward's, and those of backward if they are known.
   * @param {Item} item
   * @returns {[number, number, Inner][]}
   */
  innerOf(item) {
    const top = item.y + ROW, {inner, mirror, late} = item;
    /** @type {[number, number, Inner][]} */
    const found = [];
    if (inner) found.push([LEFT + (this.wide - inner.width) / 2, top, inner]);
    if (mirror) found.push([this.left2 + (item.w2 - mirror.width) / 2, top, mirror]);
    if (late) found.push([this.left3 + (item.w3 - late.width) / 2, top, late]);
    return found;
  }

  /**
   * Compare with another memory limit; null for none.
   * @param {number | null} nbytes
   */
  setLimit(nbytes) {
    this.data = {...this.data, memory: nbytes};
    this.showSide();
    this.draw();
    if (this.options.onstate) this.options.onstate();
  }

  // ---- selection, opening, search
  /**
   * @param {Target | null} target
   * @param {boolean} [reveal]
   */
  select(target, reveal = false) {
    this.selected = target;
    if (target && target.op !== undefined) this.uncover(target.op);
    if (reveal && target) this.centre(target);
    this.said.textContent = target ? this.describe(target) : "nothing is selected";
    this.showSide();
    this.draw();
  }
  /**
   * Select and point at nothing that is no longer there.
   * @param {number} stages
   */
  forgetBeyond(stages) {
    const isGone = (/** @type {Target | null} */ at) => at && Math.max(at.stage ?? 0, at.border ?? 0) >= stages;
    if (isGone(this.selected)) this.selected = null;
    if (isGone(this.hovered)) this.hovered = null;
  }
  /** @param {Target | null} target */
  hover(target) {
    if (JSON.stringify(target) === JSON.stringify(this.hovered)) return;
    this.hovered = target;
    this.draw();
  }
  /**
   * Open the row of an op and the modules around it.
   * @param {number} op
   */
  uncover(op) {
    const row = this.ops.row[op], visible = () => this.innerOf(this.itemOf[row]).some(([, , inner]) => inner.boxes.has(op));
    if (visible()) return;
    this.open.delete(row);
    this.open.add(row);
    this.layout();
    for (let inside = 0; !visible() && inside < 99; inside++) {
      const hiding = this.innerOf(this.itemOf[row]).flatMap(([, , inner]) => inner.frames).find(frame => !frame.open && frame.ops.includes(op));
      if (!hiding) break;
      this.turn(hiding.key);
      this.layout();
    }
  }
  /**
   * Open or close a module inside a row.
   * @param {string} frame its key
   */
  turn(frame) { if (!this.toggled.delete(frame)) this.toggled.add(frame); }
  /**
   * Open or close a row, or a module inside it.
   * @param {number} row
   * @param {string} [frame]
   */
  toggle(row, frame) {
    const {start, end, shows, y} = this.itemOf[row];
    if (frame) this.turn(frame);
    else if (shows < 0) this.open.add(row);
    else for (let i = start; i < end; i++) this.open.delete(i);
    this.layout();
    this.y += (y - this.itemOf[row].y) * this.zoom;
    this.draw();
  }
  /** @param {string} text */
  find(text) {
    const wanted = text.trim().toLowerCase();
    this.query = wanted ? this.ops.find(wanted, this.data.rows) : null;
    this.at = -1;
    this.found = this.query && new Set(this.query.map(i => this.ops.row[i]));
    this.hits.textContent = this.query ? `${this.query.length} found` : "";
    this.draw();
  }
  nextHit() {
    if (!this.query || !this.query.length) return;
    this.at = (this.at + 1) % this.query.length;
    this.select({op: this.query[this.at]}, true);
  }
  /**
   * The row of a target; the first row of a stage.
   * @param {Target} target
   */
  rowOf(target) { return target.row ?? (target.op !== undefined ? this.ops.row[target.op] : this.borders[target.stage ?? 0]); }
  /** @param {Target} target */
  centre(target) {
    const item = this.itemOf[this.rowOf(target)], {op} = target;
    const here = op === undefined ? undefined : this.innerOf(item).find(([, , inner]) => inner.boxes.has(op)), box = here && op !== undefined ? known(here[2].boxes, op) : {x: 0, y: 0, alone: ""};
    this.zoom = Math.max(this.zoom, 0.8);
    this.x = this.main.clientWidth / 2 - ((here ? here[0] : LEFT) + box.x + OPW / 2) * this.zoom;
    this.y = this.main.clientHeight / 2 - (item.y + box.y + ROW) * this.zoom;
  }
  /**
   * Zoom to the whole width, and to the whole height if that is legible: a tall ladder shows its top.
   * @param {number} [least]
   */
  fit(least = READABLE) { fitInto(this, least); }
  /**
   * Scroll by so many pixels, but not past the picture; return whether it moved.
   * @param {number} right
   * @param {number} down
   */
  scroll(right, down) { return scrolled(this, right, down); }

  // ---- drawing, at most once a frame
  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.paint(); if (this.chart) this.chart.paint(); });
  }
  paint() {
    this.paintOn(...context(this.canvas));
  }
  /**
   * @param {CanvasRenderingContext2D} c
   * @param {number} w
   * @param {number} h
   */
  paintOn(c, w, h) {
    const style = getComputedStyle(this.root), ink = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    this.ink = {fg: ink("--fg"), mut: ink("--mut"), bg: ink("--bg"), bad: ink("--bad"), rib: ink("--rib")};
    c.clearRect(0, 0, w, h);
    c.save();
    c.translate(this.x, this.y);
    c.scale(this.zoom, this.zoom);
    this.seen = {top: -this.y / this.zoom, bottom: (h - this.y) / this.zoom};
    this.bands(c);
    if (this.trains) paintRibbons(this, c);
    paintSkips(this, c);
    if (this.othersOf(0).length) paintOtherPlans(this, c);
    for (const item of this.items) if (item.y + item.h > this.seen.top && item.y < this.seen.bottom) paintBox(this, c, item);
    this.paintStageBorders(c);
    c.restore();
  }
}

// @ts-check
// Draws boxes, arrows and ribbons of a picture on its canvas.
import {SMALL, legible, put, shorten, stripes} from "./canvas.js";
import {BOX, GAP, LEFT, ROW, OP, OPW} from "./ops.js";
import {merge, sum} from "./totals.js";
import {duration, size} from "./units.js";

/** @typedef {import("./picture.js").Picture<CommonData>} AnyPicture */
/** @typedef {CanvasRenderingContext2D} Canvas */

/** How far a ribbon goes straight on at both ends, as the control points of its curve. */
const BOW = 70;

/** @param {number} stage */
export const colourOf = stage => COLOURS[stage % COLOURS.length];

/**
 * Draw a heading above the boxes.
 * @param {AnyPicture} p
 * @param {Canvas} c
 * @param {string} text
 * @param {number} x the middle of the text
 */
export function heading(p, c, text, x) { put(c, text, x, -14, "600 12px system-ui", p.ink.mut, "center"); }
/** @param {number} number of a plan beside: A, B, C */
export const letterOf = number => String.fromCharCode(65 + number);
/**
 * On the left, draw the stages of the plans beside, and mark the rows that are in another stage in one of them.
 * @param {AnyPicture} p
 * @param {Canvas} c
 */
export function paintOtherPlans(p, c) {
  const count = p.othersOf(0).length;
  for (let number = 0; number < count; number++) {
    const left = -28 - 34 * number;
    heading(p, c, count > 1 ? letterOf(number) : "beside", left + 11);
    p.items.forEach((item, i) => {
      const other = p.othersOf(item.start)[number], colour = colourOf(other), first = !i || p.othersOf(p.items[i - 1].start)[number] !== other;
      c.fillStyle = colour;
      c.fillRect(left, item.y - GAP / 2 + (first ? 2 : -1), 22, item.h + GAP + (first ? -2 : 1));
      if (first) put(c, String(other), left + 11, item.y + 14, "600 12px system-ui", legible(colour), "center");
    });
  }
  for (const item of p.items) if (p.othersOf(item.start).some(other => other !== p.stageOf(item.start))) put(c, "moved", LEFT - 8, item.y + ROW / 2 + 4, "600 10px system-ui", p.ink.fg, "right");
}
/**
 * Draw a row: forward on the left, backward on the right, and its ops if it is open.
 * @param {AnyPicture} p
 * @param {Canvas} c
 * @param {Item} item
 */
export function paintBox(p, c, item) {
  const price = p.priceOf(item.start, item.end), x = LEFT + (p.wide - item.w) / 2, colour = p.paintOf(item.start, false), {unit} = p.data, {found} = p;
  const faint = found && ![...Array(item.end - item.start).keys()].some(i => found.has(item.start + i));
  const marked = (/** @type {Target | null} */ at) => at && at.row !== undefined && p.itemOf[at.row] === item;
  const line = marked(p.selected) ? p.ink.fg : marked(p.hovered) ? p.ink.mut : null;
  c.globalAlpha = faint ? 0.25 : 1;
  rect(p, c, x, item.y, item.w, item.h, item.inner ? p.ink.bg : colour, line || colour);
  label(p, c, item.inner ? "▾ " : "▸ ", p.name(item), duration(price.forward, unit), x, item.y, item.w, item.inner ? p.ink.fg : legible(colour));
  const late = p.paintOf(item.start, true);
  const back = (/** @type {1 | 2} */ column, /** @type {string} */ sign, /** @type {number} */ left, /** @type {number} */ w, /** @type {Inner | null} */ inner, /** @type {number} */ seconds) => {
    const empty = !inner && p.isEmpty(item, column);
    if (empty) c.globalAlpha *= 0.3;
    rect(p, c, left, item.y, w, inner ? item.h : ROW, inner ? p.ink.bg : late, line || late);
    if (empty) c.globalAlpha = faint ? 0.25 : 1;
    if (!inner && column === 1 && p.hatched(item)) stripes(c, left, item.y, p.hatched(item), ROW);
    label(p, c, sign, p.name(item), empty ? "" : duration(seconds, unit), left, item.y, w, inner || empty ? p.ink.fg : legible(late));
  };
  if (p.trains) back(1, p.divided ? "∇x " : "∇ ", p.left2, item.w2, item.mirror, price.backward);
  if (p.divided) back(2, "∇w ", p.left3, item.w3, item.late, price.weight ?? 0);
  for (const [left, top, inner] of p.innerOf(item)) paintInner(p, c, inner, left, top, item.shows);
  c.globalAlpha = 1;
}
/**
 * Draw the ops of an open row.
 * @param {AnyPicture} p
 * @param {Canvas} c
 * @param {Inner} inner
 * @param {number} left
 * @param {number} top
 * @param {number} row
 */
function paintInner(p, c, inner, left, top, row) {
  const {ops} = p, hits = p.query && new Set(p.query);
  for (const frame of inner.frames) if (frame.open) paintFrame(p, c, frame, left, top, row);
  c.strokeStyle = p.ink.rib;
  c.lineWidth = 1;
  c.beginPath();
  for (const [op, to] of inner.place) for (const read of ops.reads[op]) {
    const from = inner.place.get(read);
    // ops of one closed module have one place
    if (!from || (from.x === to.x && from.y === to.y)) continue;
    c.moveTo(left + from.x + from.w / 2, top + from.y + (inner.up ? 0 : from.h));
    c.lineTo(left + to.x + to.w / 2, top + to.y + (inner.up ? to.h : 0));
  }
  c.stroke();
  for (const frame of inner.frames) if (!frame.open) paintFrame(p, c, frame, left, top, row);
  for (const [op, box] of inner.boxes) {
    const on = p.selected && p.selected.op === op, colour = p.paintOf(row, !!inner.up && op >= p.late);
    c.globalAlpha = hits && !hits.has(op) ? 0.25 : 1;
    rect(p, c, left + box.x, top + box.y, OPW, OP, colour, on ? p.ink.fg : colour);
    if (p.isRepeated(op, inner)) stripes(c, left + box.x, top + box.y, OPW, OP);
    label(p, c, "", `${box.alone && `${box.alone}: `}${ops.op(op).replace(/^aten\.(\w+)\.\w+$/, "$1")}`, ops.value(op).replace(/^\w+\[(.*)\]$/, (_, dims) => dims.replace(/, /g, "×")), left + box.x, top + box.y, OPW, legible(colour), OP);
  }
}
/**
 * Draw a module inside a row: a frame with its name, or, if it is closed, a box.
 * @param {AnyPicture} p
 * @param {Canvas} c
 * @param {Frame} frame
 * @param {number} left
 * @param {number} top
 * @param {number} row
 */
function paintFrame(p, c, {key, module, ops, x, y, w, h, open}, left, top, row) {
  const colour = p.paintOf(row, ops[0] >= p.late), on = p.selected && p.selected.frame === key, name = module.split(".").pop() || "", time = duration(sum(ops.map(op => p.ops.seconds(op))), p.data.unit);
  const faint = p.query && !p.query.some(hit => ops.includes(hit)), line = on ? p.ink.fg : colour;
  c.globalAlpha = faint ? 0.25 : 1;
  rect(p, c, left + x, top + y, w, h, open ? p.ink.bg : colour, line);
  label(p, c, open ? "▾ " : "▸ ", `${name}, ${ops.length} ops`, time, left + x, top + y, w, open ? p.ink.fg : legible(colour), open ? 17 : OP);
  c.globalAlpha = 1;
}
/**
 * @param {AnyPicture} p
 * @param {Canvas} c
 * @param {number} x
 * @param {number} y
 * @param {number} w
 * @param {number} h
 * @param {string} fill
 * @param {string} line
 */
function rect(p, c, x, y, w, h, fill, line) {
  c.beginPath();
  c.roundRect(x, y, w, h, 5);
  c.fillStyle = fill;
  c.fill();
  c.lineWidth = line === p.ink.fg ? 3 : 1;
  c.strokeStyle = line;
  c.stroke();
}
/**
 * Write a name on a box. A text after a sign is the path of a module, whose end matters: the start is cut off.
 * @param {AnyPicture} p
 * @param {Canvas} c
 * @param {string} sign
 * @param {string} text
 * @param {string} right
 * @param {number} x
 * @param {number} y
 * @param {number} w
 * @param {string} ink
 * @param {number} [h]
 */
function label(p, c, sign, text, right, x, y, w, ink, h = ROW) {
  // in pixels of the screen: zoomed browsers and phones have several for each of the page
  if (h * p.zoom * (window.devicePixelRatio || 1) < 8) return;
  c.font = SMALL;
  const room = w - 16 - c.measureText(sign).width, tail = c.measureText(right).width, gives = tail < room * 0.6;
  put(c, sign + shorten(c, text, room - (gives ? tail + 8 : 0), !!sign), x + 8, y + h / 2 + 4, c.font, ink);
  if (gives) put(c, right, x + w - 8, y + h / 2 + 4, c.font, ink, "right");
}
/**
 * Draw arrows from a row to the next, and arcs for values that skip rows: forward on the left, gradients on the right.
 * @param {AnyPicture} p
 * @param {Canvas} c
 */
export function paintSkips(p, c) {
  const merged = merge(p.edges, p.itemOf);
  const most = Math.max(1, ...merged.map(e => e[2])), far = Math.max(...merged.map(e => e[1] - e[0]));
  for (const [from, to, nbytes] of merged) {
    const a = p.items[from], b = p.items[to], skip = to > from + 1;
    if (Math.max(a.y, b.y + b.h) < p.seen.top || Math.min(a.y, b.y) > p.seen.bottom) continue;
    c.strokeStyle = p.ink.rib;
    c.lineWidth = 1 + 3 * Math.sqrt(nbytes / most);
    c.globalAlpha = skip ? 0.55 : 1;
    c.beginPath();
    if (skip) arc(c, LEFT + (p.wide - a.w) / 2, a.y + ROW / 2, LEFT + (p.wide - b.w) / 2, b.y + ROW / 2, -1, (to - from) / far);
    else { c.moveTo(LEFT + p.wide / 2, a.y + a.h); c.lineTo(LEFT + p.wide / 2, b.y); }
    if (p.trains) {
      const left = p.left2;
      if (skip) arc(c, left + a.w2, a.y + ROW / 2, left + b.w2, b.y + ROW / 2, 1, (to - from) / far);
      else { c.moveTo(left + BOX / 2, a.y + (a.mirror ? a.h : ROW)); c.lineTo(left + BOX / 2, b.y); }
    }
    c.stroke();
    c.globalAlpha = 1;
  }
}
/**
 * @param {Canvas} c
 * @param {number} x
 * @param {number} y
 * @param {number} x2
 * @param {number} y2
 * @param {number} side -1 for the left, 1 for the right
 * @param {number} far the number of rows that it skips, as a share of the most
 */
function arc(c, x, y, x2, y2, side, far) {
  // the arc lies outside the wider of the two boxes
  const out = side * Math.max(side * x, side * x2) + side * (6 + 26 * far);
  c.moveTo(x, y);
  c.bezierCurveTo(out, y, out, y2, x2, y2);
}
/**
 * Draw the values that forward saves for backward, and those that wait between the parts of backward.
 * @param {AnyPicture} p
 * @param {Canvas} c
 */
export function paintRibbons(p, c) {
  p.ribbons = merge(p.saved, p.itemOf, true);
  p.waitingRibbons = p.divided ? merge(p.waits, p.itemOf, true) : [];
  paintBetween(p, c, p.ribbons, LEFT + p.wide, p.left2, item => (p.wide - item.w) / 2, 0);
  if (p.divided) paintBetween(p, c, p.waitingRibbons, p.left2 + p.wide2, p.left3, item => p.wide2 - item.w2, 1);
}
/**
 * Draw ribbons between two columns.
 * @param {AnyPicture} p
 * @param {Canvas} c
 * @param {Triple[]} merged
 * @param {number} left
 * @param {number} right
 * @param {(item: Item) => number} gap from the box of an item to the edge of its column
 * @param {number} number of the gap between columns
 */
function paintBetween(p, c, merged, left, right, gap, number) {
  const most = Math.max(1, ...merged.map(e => e[2]));
  /** @type {number[]} */
  const taken = [];
  for (const [from, to, nbytes] of [...merged].sort((a, b) => a[2] - b[2])) {
    const a = p.items[from], b = p.items[to], y = a.y + ROW / 2, y2 = b.y + ROW / 2;
    const crosses = p.stageOf(a.start) !== p.stageOf(b.start);
    const at = p.hovered && p.hovered.ribbon, on = at && at[0] === from && at[1] === to && (at[2] || 0) === number;
    c.strokeStyle = crosses ? p.ink.fg : p.ink.rib;
    c.globalAlpha = on ? 1 : crosses ? 0.8 : 0.55;
    c.lineWidth = ribbonWidth(nbytes, most);
    c.beginPath();
    c.moveTo(left - gap(a), y);
    c.lineTo(left, y);
    c.bezierCurveTo(left + BOW, y, right - BOW, y2, right, y2);
    c.stroke();
    c.globalAlpha = 1;
  }
  for (const [from, to, nbytes] of [...merged].sort((a, b) => b[2] - a[2])) {
    const y = (p.items[from].y + p.items[to].y) / 2 + ROW / 2 - 3;
    if (nbytes < most / 50 || taken.some(t => Math.abs(t - y) < 14)) continue;
    taken.push(y);
    put(c, size(nbytes), (left + right) / 2, y, "600 10px system-ui", p.ink.fg, "center", p.ink.bg);
  }
}
/**
 * @param {number} nbytes
 * @param {number} most the bytes of the widest
 */
const ribbonWidth = (nbytes, most) => Math.max(1, 16 * nbytes / most);
/**
 * The ribbon below a place, as the numbers of its two items, and 1 where it waits between the parts of backward.
 * @param {AnyPicture} p
 * @param {number} x
 * @param {number} y
 * @returns {[number, number, number?] | null}
 */
export function ribbonAt(p, x, y) {
  const saved = ribbonBetween(p, p.ribbons, LEFT + p.wide, p.left2, x, y);
  if (saved || !p.divided) return saved;
  const waits = ribbonBetween(p, p.waitingRibbons, p.left2 + p.wide2, p.left3, x, y);
  return waits && [...waits, 1];
}
/**
 * The ribbon between two columns that is below a place: the topmost, which is the widest.
 * @param {AnyPicture} p
 * @param {Triple[]} ribbons
 * @param {number} left
 * @param {number} right
 * @param {number} x
 * @param {number} y
 * @returns {[number, number] | null}
 */
function ribbonBetween(p, ribbons, left, right, x, y) {
  const most = Math.max(1, ...ribbons.map(e => e[2]));
  if (x <= left + 2 || x >= right - 2) return null;
  // the curve goes on to the right: halve the interval of its parameter
  let low = 0, high = 1;
  for (let i = 0; i < 20; i++) {
    const t = (low + high) / 2, s = 1 - t, at = s ** 3 * left + 3 * s * s * t * (left + BOW) + 3 * s * t * t * (right - BOW) + t ** 3 * right;
    if (at < x) low = t; else high = t;
  }
  const share = 3 * (1 - low) * low * low + low ** 3;
  const hits = ribbons.filter(([from, to, nbytes]) => {
    const a = p.items[from].y + ROW / 2, b = p.items[to].y + ROW / 2;
    return Math.abs(a + (b - a) * share - y) <= Math.max(3 / p.zoom, ribbonWidth(nbytes, most) / 2);
  });
  const top = hits.sort((a, b) => b[2] - a[2])[0];
  return top ? [top[0], top[1]] : null;
}
/**
 * Draw a dashed line.
 * @param {Canvas} c
 * @param {number} x
 * @param {number} y
 * @param {number} x2
 * @param {number} y2
 */
export function dashed(c, x, y, x2, y2) {
  c.setLineDash([7, 5]);
  c.beginPath();
  c.moveTo(x, y);
  c.lineTo(x2, y2);
  c.stroke();
  c.setLineDash([]);
}

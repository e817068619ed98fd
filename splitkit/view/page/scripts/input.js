// @ts-check
// Handles mouse and keys of a picture.
import {GAP, LEFT, OP, OPW} from "./ops.js";
import {ribbonAt} from "./drawing.js";
import {showTip} from "./elements.js";

/** @typedef {import("./picture.js").Picture<CommonData>} AnyPicture */

/**
 * Return what lies below the mouse.
 * @param {AnyPicture} p
 * @param {MouseEvent} event
 * @returns {Target | null}
 */
export function pick(p, event) {
  const x = (event.offsetX - p.x) / p.zoom, y = (event.offsetY - p.y) / p.zoom, {borders} = p;
  const borderAt = !p.showsBorders ? -1 : borders.findIndex((row, k) => k > 0 && k < borders.length - 1 && Math.abs(p.itemOf[row].y - GAP / 2 - y) * p.zoom < 6);
  if (borderAt > 0 && x > 0 && x < p.right + 20) return {border: borderAt};
  const ribbon = p.trains ? ribbonAt(p, x, y) : null;
  if (ribbon) return {ribbon};
  const item = p.items.find(i => y >= i.y && y <= i.y + i.h);
  if (!item || x < 0 || x > p.right + 20) return null;
  for (const [left, top, inner] of p.innerOf(item)) {
    const isIn = (/** @type {Box} */ box, /** @type {number} */ w, /** @type {number} */ h) => x >= left + box.x && x <= left + box.x + w && y >= top + box.y && y <= top + box.y + h;
    for (const [op, box] of inner.boxes) if (isIn(box, OPW, OP)) return {op};
    const frame = inner.frames.filter(each => isIn(each, each.w, each.h)).at(-1);
    if (frame) return {row: item.shows, frame: frame.key};
  }
  const left = LEFT + (p.wide - item.w) / 2, within = (/** @type {number} */ from, /** @type {number} */ wide) => x >= from && x <= from + wide;
  const inside = within(left, item.w) || (p.trains && within(p.left2, item.w2)) || (p.divided && within(p.left3, item.w3));
  return inside ? {row: item.start} : p.stageTarget(item.start);
}
/**
 * Zoom, keeping a point of the canvas where it is.
 * @param {AnyPicture} p
 * @param {number} factor
 * @param {number} x
 * @param {number} y
 */
function zoomAt(p, factor, x, y) {
  const next = Math.max(0.05, Math.min(4, p.zoom * factor));
  p.untouched = false;
  p.x = x - (x - p.x) * next / p.zoom;
  p.y = y - (y - p.y) * next / p.zoom;
  p.zoom = next;
  p.draw();
}
/**
 * Zoom and move with two fingers.
 * @param {AnyPicture} p
 * @param {Map<number, PointerEvent>} fingers
 * @param {PointerEvent} e the finger that moves
 */
function pinch(p, fingers, e) {
  const [one, two] = [...fingers.values()], other = one.pointerId === e.pointerId ? two : one, before = one === other ? two : one;
  const apart = (/** @type {PointerEvent} */ a) => Math.max(1, Math.hypot(a.offsetX - other.offsetX, a.offsetY - other.offsetY));
  fingers.set(e.pointerId, e);
  p.x += (e.offsetX - before.offsetX) / 2;
  p.y += (e.offsetY - before.offsetY) / 2;
  zoomAt(p, apart(e) / apart(before), (e.offsetX + other.offsetX) / 2, (e.offsetY + other.offsetY) / 2);
}
/**
 * Listen on the canvas: the wheel scrolls, with Ctrl or by two fingers it zooms; dragging moves the canvas or a border,
 * clicks select and open boxes.
 * @param {AnyPicture} p
 */
export function listen(p) {
  const {canvas} = p;
  /** @type {{border: number, x: number, y: number, moved: boolean} | null} */
  let drag = null;
  /** @type {Map<number, PointerEvent>} */
  const fingers = new Map();
  canvas.addEventListener("wheel", e => {
    const lines = e.deltaMode === 1 ? 16 : 1, [right, down] = e.shiftKey ? [e.deltaX || e.deltaY, 0] : [e.deltaX, e.deltaY];
    // at its end, the page around the picture scrolls on
    if (e.ctrlKey || e.metaKey) zoomAt(p, Math.exp(-e.deltaY * lines * 0.0015), e.offsetX, e.offsetY);
    else if (!p.scroll(right * lines, down * lines)) return;
    e.preventDefault();
  }, {passive: false});
  canvas.addEventListener("pointerdown", e => {
    canvas.setPointerCapture(e.pointerId);
    p.untouched = false;
    fingers.set(e.pointerId, e);
    if (fingers.size > 1) { drag = null; return; }
    const at = pick(p, e);
    const border = p.movable && at && at.border || 0;
    if (border) p.beginDrag();
    drag = {border, x: e.clientX - p.x, y: e.clientY - p.y, moved: false};
  });
  canvas.addEventListener("pointermove", e => {
    if (fingers.size === 2 && fingers.has(e.pointerId)) return pinch(p, fingers, e);
    if (drag) p.tip.style.display = "none";
    if (drag && drag.border) return p.moveBorder(drag.border, p.rowNear((e.offsetY - p.y) / p.zoom));
    if (drag) {
      const x = e.clientX - drag.x, y = e.clientY - drag.y;
      if (drag.moved || Math.hypot(x - p.x, y - p.y) > 3) { Object.assign(p, {x, y}); drag.moved = true; p.draw(); }
      return;
    }
    const at = pick(p, e);
    canvas.style.cursor = at && at.border && p.movable ? "ns-resize" : at && (at.op ?? at.row) !== undefined ? "pointer" : "grab";
    p.hover(at);
    showTip(p.tip, p.main, at ? p.describe(at) : "", e);
  });
  canvas.addEventListener("pointerup", e => {
    if (drag && !drag.border && !drag.moved) { const at = pick(p, e); p.select(at && (at.border || at.ribbon) ? null : at); }
    lift(e);
  });
  const lift = (/** @type {PointerEvent} */ e) => { fingers.delete(e.pointerId); drag = null; p.endDrag(); };
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { p.tip.style.display = "none"; p.hover(null); });
  canvas.addEventListener("dblclick", e => { const at = pick(p, e); if (at && at.row !== undefined) p.toggle(at.row, at.frame); });
  canvas.addEventListener("keydown", e => pressKey(p, e));
}
/**
 * @param {AnyPicture} p
 * @param {KeyboardEvent} e
 */
function pressKey(p, e) {
  const row = p.selected && p.rowOf(p.selected), step = e.key === "ArrowDown" ? 1 : e.key === "ArrowUp" ? -1 : 0;
  const turn = e.ctrlKey || e.metaKey ? e.key.toLowerCase() : "";
  if (turn === "z" || turn === "y") turn === "y" || e.shiftKey ? p.redo() : p.undo();
  else if (step && e.altKey && row !== null) p.moveBorder(...p.neighbour(row, step));
  else if (step) {
    const item = row === null ? -1 : p.items.indexOf(p.itemOf[row]);
    const next = p.items[Math.max(0, Math.min(p.items.length - 1, item + step))];
    p.select({row: next.start}, true);
  } else if (e.key === "Enter" && row !== null) p.toggle(row, p.selected ? p.selected.frame : undefined);
  else if (e.key === "PageDown" || e.key === "PageUp") p.scroll(0, (e.key === "PageDown" ? 0.9 : -0.9) * p.main.clientHeight);
  else if (e.key === "Home" || e.key === "End") p.select({row: p.items[e.key === "Home" ? 0 : p.items.length - 1].start}, true);
  else if (e.key === "Escape") p.select(null);
  else if (e.key === "+" || e.key === "-") zoomAt(p, e.key === "+" ? 1.2 : 1 / 1.2, p.main.clientWidth / 2, p.main.clientHeight / 2);
  else return;
  e.preventDefault();
}

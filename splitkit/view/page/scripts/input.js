// @ts-check
// Handles mouse and keys of a picture.
import {GAP, LEFT} from "./geometry.js";
import {OP, OPW} from "./ops.js";
import {ribbonAt} from "./drawing.js";
import {showTip} from "./tooltip.js";

/** @typedef {import("./picture.js").Picture<CommonData>} AnyPicture */

/**
 * Return what lies below the mouse.
 * @param {AnyPicture} p
 * @param {MouseEvent} event
 * @returns {Target | null}
 */
export function pick(p, event) {
  const x = (event.offsetX - p.x) / p.zoom, y = (event.offsetY - p.y) / p.zoom, {borders} = p;
  const borderAt = !p.movable ? -1 : borders.findIndex((row, k) => k > 0 && k < borders.length - 1 && Math.abs(p.itemOf[row].y - GAP / 2 - y) * p.zoom < 6);
  if (borderAt > 0 && x > 0 && x < p.right + 20) return {border: borderAt};
  const ribbon = p.trains ? ribbonAt(p, x, y) : null;
  if (ribbon) return {ribbon};
  const item = p.items.find(i => y >= i.y && y <= i.y + i.h);
  if (!item || x < 0 || x > p.right + 20) return null;
  for (const [left, top, inner] of p.innerOf(item)) for (const [op, box] of inner.boxes)
    if (x >= left + box.x && x <= left + box.x + OPW && y >= top + box.y && y <= top + box.y + OP) return {op};
  const left = LEFT + (p.wide - item.w) / 2, right = p.right - p.wide2;
  const inside = (x >= left && x <= left + item.w) || (p.trains && x >= right && x <= right + item.w2);
  return inside ? {row: item.start} : p.stageTarget(item.start);
}
/**
 * Listen on the canvas: the wheel zooms, dragging moves the canvas or a border, clicks select and open boxes.
 * @param {AnyPicture} p
 */
export function listen(p) {
  const {canvas} = p;
  /** @type {{border: number, x: number, y: number, moved: boolean} | null} */
  let drag = null;
  canvas.addEventListener("wheel", e => {
    e.preventDefault();
    p.untouched = false;
    const next = Math.max(0.05, Math.min(4, p.zoom * Math.exp(-e.deltaY * 0.0015)));
    p.x = e.offsetX - (e.offsetX - p.x) * next / p.zoom;
    p.y = e.offsetY - (e.offsetY - p.y) * next / p.zoom;
    p.zoom = next;
    p.draw();
  }, {passive: false});
  canvas.addEventListener("pointerdown", e => {
    canvas.setPointerCapture(e.pointerId);
    p.untouched = false;
    const at = pick(p, e);
    if (at && at.border) p.beginDrag();
    drag = {border: at && at.border || 0, x: e.clientX - p.x, y: e.clientY - p.y, moved: false};
  });
  canvas.addEventListener("pointermove", e => {
    if (drag) p.tip.style.display = "none";
    if (drag && drag.border) return p.moveBorder(drag.border, p.rowNear((e.offsetY - p.y) / p.zoom));
    if (drag) {
      const x = e.clientX - drag.x, y = e.clientY - drag.y;
      if (drag.moved || Math.hypot(x - p.x, y - p.y) > 3) { Object.assign(p, {x, y}); drag.moved = true; p.draw(); }
      return;
    }
    const at = pick(p, e);
    canvas.style.cursor = at && at.border ? "ns-resize" : at && (at.op ?? at.row) !== undefined ? "pointer" : "grab";
    p.hover(at);
    showTip(p.tip, p.main, at ? p.describe(at) : "", e);
  });
  canvas.addEventListener("pointerup", e => {
    if (drag && !drag.border && !drag.moved) { const at = pick(p, e); p.select(at && (at.border || at.ribbon) ? null : at); }
    drag = null;
    p.endDrag();
  });
  canvas.addEventListener("pointerleave", () => { p.tip.style.display = "none"; p.hover(null); });
  canvas.addEventListener("dblclick", e => { const at = pick(p, e); if (at && at.row !== undefined) p.toggle(at.row); });
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
  } else if (e.key === "Enter" && row !== null) p.toggle(row);
  else if (e.key === "Escape") p.select(null);
  else if (e.key === "+" || e.key === "-") { p.zoom *= e.key === "+" ? 1.2 : 1 / 1.2; p.draw(); }
  else return;
  e.preventDefault();
}

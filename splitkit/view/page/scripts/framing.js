// @ts-check
// Fits a picture into its window, and arranges the window and the side panel in a cell or page.
import {BOX, LEFT, RIBBONS} from "./ops.js";

/** @typedef {import("./picture.js").Picture<CommonData>} AnyPicture */

/** The least zoom at which texts are read without effort: a taller picture scrolls. */
export const READABLE = 0.85;
/** The width of the side panel beside the picture, as in page.css. */
const SIDE = 400;

/**
 * Put the side panel below the picture where a readable picture does not fit beside it.
 * @param {AnyPicture} p
 */
export function arrange(p) {
  const columns = p.divided ? 3 : p.trains ? 2 : 1, closed = LEFT - RIBBONS + columns * (BOX + RIBBONS) + p.rightRoom;
  p.root.classList.toggle("stacked", p.root.clientWidth - SIDE < p.leftRoom + closed * READABLE);
}
/**
 * Tell the style sheet the height of the picture: above a side panel it takes no more.
 * @param {AnyPicture} p
 */
export function reserve(p) { p.root.style.setProperty("--p", `${Math.ceil((p.height + 70) * p.zoom)}px`); }
/**
 * Zoom to the whole width, and to the whole height if that is not below the least zoom.
 * @param {AnyPicture} p
 * @param {number} least
 */
export function fitInto(p, least) {
  const left = p.leftRoom, wide = p.right + p.rightRoom, h = p.main.clientHeight, isStacked = p.root.classList.contains("stacked");
  if (!p.main.clientWidth) return;
  const most = least && isStacked ? 1 : Math.min(Math.max(h / (p.height + 70), least), 1.5);
  const zoomFor = (/** @type {number} */ room) => Math.max(0.05, Math.min((room - left) / wide, most));
  p.zoom = zoomFor(p.main.clientWidth);
  reserve(p);
  p.x = Math.max(left, (p.main.clientWidth - wide * p.zoom) / 2);
  p.y = 40 * p.zoom + Math.max(0, (h - (p.height + 60) * p.zoom) / 2);
  p.draw();
}
/**
 * Scroll by so many pixels, but not past the picture; return whether it moved.
 * @param {AnyPicture} p
 * @param {number} right
 * @param {number} down
 */
export function scrolled(p, right, down) {
  const {x, y, zoom} = p;
  const within = (/** @type {number} */ at, /** @type {number} */ low, /** @type {number} */ high) => Math.max(Math.min(low, high), Math.min(Math.max(low, high), at));
  if (down) p.y = within(y - down, 40 * zoom, p.main.clientHeight - (p.height + 30) * zoom);
  if (right) p.x = within(x - right, p.leftRoom, p.main.clientWidth - (p.right + p.rightRoom) * zoom);
  p.untouched = false;
  p.draw();
  return x !== p.x || y !== p.y;
}

// @ts-check
// A small picture of the whole at the right edge, where the picture is taller than its window; dragging on it scrolls.
import {GAP} from "./geometry.js";

const WIDE = 34, EDGE_OF_MAP = 6;
/** The width of the map with its edges. */
export const MAP = WIDE + 2 * EDGE_OF_MAP;

export class Minimap {
  /** @param {import("./picture.js").Picture<CommonData>} picture */
  constructor(picture) { this.picture = picture; }
  /** Whether there is more than the window shows. */
  get isShown() { const {picture: p} = this; return (p.height + 70) * p.zoom > p.main.clientHeight + 1; }
  /** Pixels of the map for each pixel of the picture before zooming. */
  get scale() { const {picture: p} = this; return (p.main.clientHeight - 2 * EDGE_OF_MAP) / (p.height + 70); }
  /** @param {MouseEvent} e */
  has(e) { return this.isShown && e.offsetX > this.picture.room; }
  /**
   * Scroll to where the mouse is on the map.
   * @param {MouseEvent} e
   */
  go(e) {
    const {picture: p} = this, wanted = p.main.clientHeight / 2 - ((e.offsetY - EDGE_OF_MAP) / this.scale - 40) * p.zoom;
    p.scroll(0, p.y - wanted);
  }
  /**
   * @param {CanvasRenderingContext2D} c
   * @param {number} w
   * @param {number} h
   */
  paint(c, w, h) {
    if (!this.isShown) return;
    const {picture: p, scale} = this, left = w - WIDE - EDGE_OF_MAP, at = (/** @type {number} */ y) => EDGE_OF_MAP + (y + 40) * scale;
    c.globalAlpha = 0.9;
    c.fillStyle = p.ink.bg;
    c.fillRect(left - EDGE_OF_MAP, 0, MAP, h);
    c.globalAlpha = 1;
    for (const item of p.items) {
      const top = at(item.y - GAP / 2), high = Math.max(1, (item.h + GAP) * scale - 0.5);
      c.fillStyle = p.paintOf(item.start, false);
      c.fillRect(left, top, p.trains ? WIDE / 2 - 2 : WIDE, high);
      if (p.trains) { c.fillStyle = p.paintOf(item.start, true); c.fillRect(left + WIDE / 2 + 2, top, WIDE / 2 - 2, high); }
    }
    c.strokeStyle = p.ink.fg;
    c.lineWidth = 1.5;
    c.strokeRect(left - 3, at(-p.y / p.zoom), WIDE + 6, h / p.zoom * scale);
  }
}

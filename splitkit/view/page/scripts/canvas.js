// @ts-check
// Draws text, lines and hatching on a canvas. Texts from models go through fillText only, so they cannot be markup.

export const SMALL = "11px system-ui";

/**
 * The drawing context of a canvas, scaled to the screen's pixels, and the canvas's width and height.
 * @param {HTMLCanvasElement} canvas
 * @returns {[CanvasRenderingContext2D, number, number]}
 */
export function context(canvas) {
  const box = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1, c = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const w = Math.round(box.width * ratio), h = Math.round(box.height * ratio);
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, {width: w, height: h});
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  return [c, box.width, box.height];
}
/**
 * Draw a line of text; `back` is the colour of a box behind it.
 * @param {CanvasRenderingContext2D} c
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {string} font
 * @param {string} ink
 * @param {CanvasTextAlign} [align]
 * @param {string} [back]
 */
export function put(c, text, x, y, font, ink, align = "left", back = "") {
  c.font = font;
  c.textAlign = align;
  if (back) {
    const w = c.measureText(text).width, left = align === "right" ? x - w : align === "center" ? x - w / 2 : x;
    c.globalAlpha = 0.85;
    c.fillStyle = back;
    c.fillRect(left - 3, y - 10, w + 6, 13);
    c.globalAlpha = 1;
  }
  c.fillStyle = ink;
  c.fillText(text, x, y);
}
/**
 * Shorten a text to the room, keeping its end or its start.
 * @param {CanvasRenderingContext2D} c
 * @param {string} text
 * @param {number} room
 * @param {boolean} end
 */
export function shorten(c, text, room, end) {
  if (c.measureText(text).width <= room) return text;
  const kept = (/** @type {number} */ count) => end ? `…${text.slice(text.length - count)}` : `${text.slice(0, count)}…`;
  let low = 0, high = text.length;
  while (low < high) { const middle = (low + high + 1) >> 1; c.measureText(kept(middle)).width <= room ? low = middle : high = middle - 1; }
  return kept(low);
}
/**
 * Draw a limit as a line across a chart.
 * @param {CanvasRenderingContext2D} c
 * @param {number} x
 * @param {number} x2
 * @param {number} y
 * @param {string} ink
 */
export function level(c, x, x2, y, ink) {
  c.strokeStyle = ink;
  c.beginPath();
  c.moveTo(x, y);
  c.lineTo(x2, y);
  c.stroke();
}
/**
 * Black or white, whichever is legible on a colour; as ink_on of view/svg/drawing.py.
 * @param {string} colour
 */
export function legible(colour) {
  const [r, g, b] = [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10151c" : "#fff";
}
/**
 * Draw the hatching of what is recomputed.
 * @param {CanvasRenderingContext2D} c
 * @param {number} x
 * @param {number} y
 * @param {number} w
 * @param {number} h
 */
export function stripes(c, x, y, w, h) {
  c.save();
  c.beginPath();
  c.rect(x, y, w, h);
  c.clip();
  c.strokeStyle = "#ffffff55";
  c.lineWidth = 2;
  c.beginPath();
  for (let at = x - h; at < x + w; at += 7) { c.moveTo(at, y + h); c.lineTo(at + h, y); }
  c.stroke();
  c.restore();
}

// @ts-check
// A drawing context that writes SVG: it has the part of the canvas's interface that the pictures use.

/** @param {number} x */
const short = x => String(Math.round(x * 100) / 100);
/** @param {string} text */
const escapedText = text => text.replace(/[&<>"]/g, letter => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[letter] || letter).replace(/[\x00-\x08\x0b\x0c\x0e-\x1f]/g, "�");

/** @typedef {{fillStyle: string, strokeStyle: string, lineWidth: number, globalAlpha: number, font: string, textAlign: string, dash: string, left: number, top: number, groups: number}} Style `left` and `top` are the translation, `groups` the open elements */

export class SvgContext {
  constructor() {
    this.fillStyle = this.strokeStyle = "#000";
    this.lineWidth = this.globalAlpha = 1;
    this.font = "10px system-ui";
    this.textAlign = "left";
    this.dash = "";
    this.left = this.top = this.groups = this.clips = 0;
    /** @type {Style[]} */
    this.saved = [];
    /** @type {string[]} */
    this.parts = [];
    this.path = "";
    // widths of texts are the browser's
    this.ruler = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  }
  /**
   * @param {number} w
   * @param {number} h
   * @param {string} paper
   * @param {string} title
   */
  toSvg(w, h, paper, title) {
    return `<svg xmlns="http:\/\/www.w3.org/2000/svg" width="${short(w)}" height="${short(h)}" viewBox="0 0 ${short(w)} ${short(h)}"><title>${escapedText(title)}</title><rect width="100%" height="100%" fill="${paper}"/>${this.parts.join("")}</svg>`;
  }
  save() {
    const {fillStyle, strokeStyle, lineWidth, globalAlpha, font, textAlign, dash, left, top, groups} = this;
    this.saved.push({fillStyle, strokeStyle, lineWidth, globalAlpha, font, textAlign, dash, left, top, groups});
    this.groups = 0;
  }
  restore() {
    for (; this.groups > 0; this.groups--) this.parts.push("</g>");
    Object.assign(this, this.saved.pop());
  }
  /**
   * @param {number} x
   * @param {number} y
   */
  translate(x, y) { this.left += x; this.top += y; }
  // pictures are written at their natural size
  scale() {}
  clearRect() {}
  /** @param {number[]} dash */
  setLineDash(dash) { this.dash = dash.join(" "); }
  /**
   * @param {number} x
   * @param {number} y
   */
  at(x, y) { return `${short(x + this.left)} ${short(y + this.top)}`; }
  beginPath() { this.path = ""; }
  /**
   * @param {number} x
   * @param {number} y
   */
  moveTo(x, y) { this.path += `M${this.at(x, y)}`; }
  /**
   * @param {number} x
   * @param {number} y
   */
  lineTo(x, y) { this.path += `${this.path ? "L" : "M"}${this.at(x, y)}`; }
  /** @param {[number, number, number, number, number, number]} points */
  bezierCurveTo(...points) { this.path += `C${this.at(points[0], points[1])} ${this.at(points[2], points[3])} ${this.at(points[4], points[5])}`; }
  /**
   * @param {number} x
   * @param {number} y
   * @param {number} w
   * @param {number} h
   */
  rect(x, y, w, h) { this.path += `M${this.at(x, y)}h${short(w)}v${short(h)}h${short(-w)}z`; }
  /**
   * @param {number} x
   * @param {number} y
   * @param {number} w
   * @param {number} h
   * @param {number} wanted the radius
   */
  roundRect(x, y, w, h, wanted) {
    const r = Math.min(wanted, w / 2, h / 2), turn = (/** @type {number} */ right, /** @type {number} */ down) => `a${short(r)} ${short(r)} 0 0 1 ${short(right)} ${short(down)}`;
    this.path += `M${this.at(x + r, y)}h${short(w - 2 * r)}${turn(r, r)}v${short(h - 2 * r)}${turn(-r, r)}h${short(2 * r - w)}${turn(-r, -r)}v${short(2 * r - h)}${turn(r, -r)}z`;
  }
  clip() {
    const name = `clip${++this.clips}`;
    this.parts.push(`<clipPath id="${name}"><path d="${this.path}"/></clipPath><g clip-path="url(#${name})">`);
    this.groups++;
  }
  /**
   * A colour and its opacity as attributes; `#rrggbbaa` is not known everywhere.
   * @param {"fill" | "stroke"} what
   * @param {string} colour
   */
  paint(what, colour) {
    const alpha = this.globalAlpha * (colour.length === 9 ? parseInt(colour.slice(7), 16) / 255 : 1);
    return `${what}="${escapedText(colour.length === 9 ? colour.slice(0, 7) : colour)}"${alpha < 1 ? ` ${what}-opacity="${short(alpha)}"` : ""}`;
  }
  fill() { this.parts.push(`<path d="${this.path}" ${this.paint("fill", this.fillStyle)}/>`); }
  stroke() { this.parts.push(`<path d="${this.path}" fill="none" ${this.paint("stroke", this.strokeStyle)} stroke-width="${short(this.lineWidth)}"${this.dash && ` stroke-dasharray="${this.dash}"`}/>`); }
  /**
   * @param {number} x
   * @param {number} y
   * @param {number} w
   * @param {number} h
   */
  fillRect(x, y, w, h) { this.parts.push(`<path d="M${this.at(x, y)}h${short(w)}v${short(h)}h${short(-w)}z" ${this.paint("fill", this.fillStyle)}/>`); }
  /**
   * @param {string} text
   * @param {number} x
   * @param {number} y
   */
  fillText(text, x, y) {
    const anchor = {center: "middle", right: "end"}[this.textAlign];
    this.parts.push(`<text x="${short(x + this.left)}" y="${short(y + this.top)}" style="font:${escapedText(this.font)};white-space:pre"${anchor ? ` text-anchor="${anchor}"` : ""} ${this.paint("fill", this.fillStyle)}>${escapedText(text)}</text>`);
  }
  /** @param {string} text */
  measureText(text) {
    this.ruler.font = this.font;
    return this.ruler.measureText(text);
  }
}
/**
 * The whole picture as SVG: the ladder with all its rows, and the chart below it.
 * @param {import("./picture.js").Picture<CommonData>} p
 */
export function svgOf(p) {
  const {x, y, zoom, chart} = p, left = p.leftRoom + 8, w = left + p.right + 210, high = p.height + 80, made = new SvgContext(), below = chart ? chart.canvas.clientHeight : 0;
  const c = /** @type {CanvasRenderingContext2D} */ (/** @type {unknown} */ (made));
  Object.assign(p, {x: left, y: 50, zoom: 1});
  p.paintOn(c, w, high);
  if (chart) {
    c.save();
    c.translate(0, high);
    chart.paintOn(c, w, below);
    c.restore();
  }
  Object.assign(p, {x, y, zoom});
  p.draw();
  return made.toSvg(w, high + below, p.ink.bg, `${p.data.title || "splitkit"}: forward, backward and the borders of the plan`);
}

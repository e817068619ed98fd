// @ts-check
// Draws memory as bands, with a table of them at one step, and divides that of forward and backward by module.
import {el, mark, pressed, tableOf} from "./elements.js";
import {known, sum} from "./totals.js";
import {size} from "./units.js";

/** Bands with a colour of their own: the first two colours belong to forward and backward. */
const COLOURED = COLOURS.length - 2;
export const OTHERS = "#8a94a3";
export const REST = "#c3c9d1";

/** @typedef {{name: string, row: number, kind: string, colour: string, bytes: Float64Array}} Band the first row of the module or -1, what is held of it if not all, and the bytes at each step */

/**
 * The bands, the largest at the peak first, then all other modules, then what is not listed: small values, and what ops
 * take while they run. Together they are the bytes of each step. Folded layers form one band.
 * @param {import("./joint.js").Halves} p
 * @param {StepMemory} memory
 * @param {number[]} totals the bytes of each step
 * @returns {Band[]}
 */
export function bandsOf(p, memory, totals) {
  /** @type {Map<number, Float64Array>} first row of an item, or -1 -> the changes at each step */
  const changes = new Map(), steps = totals.length, rowOf = rowsOfNames(p);
  for (const [maker, , born, dies, nbytes] of memory.alive) {
    const row = typeof maker === "number" ? p.ops.row[maker] : rowOf(maker), key = row < 0 ? -1 : p.itemOf[row].start;
    if (!changes.has(key)) changes.set(key, new Float64Array(steps + 1));
    const own = known(changes, key);
    own[Math.max(0, born)] += nbytes;
    own[Math.min(steps, dies + 1)] -= nbytes;
  }
  const found = [...changes].map(([row, own]) => {
    for (let step = 1; step < steps; step++) own[step] += own[step - 1];
    return {name: row < 0 ? "inputs" : p.name(p.itemOf[row]), row, kind: "", colour: "", bytes: own.subarray(0, steps)};
  }).sort((a, b) => b.bytes[memory.at] - a.bytes[memory.at] || a.row - b.row);
  const shown = found.slice(0, COLOURED).map((band, i) => ({...band, colour: COLOURS[i + 2]})), others = found.slice(COLOURED);
  const rest = Float64Array.from(totals, (total, step) => total - sum(found.map(band => band.bytes[step])));
  if (others.length) shown.push({name: others.length > 1 ? `${others.length} other modules` : others[0].name, row: others.length > 1 ? -1 : others[0].row, kind: "", colour: OTHERS, bytes: rest.map((_, step) => sum(others.map(band => band.bytes[step])))});
  return [...shown, {name: "small values, and what ops take while they run", row: -1, kind: "", colour: REST, bytes: rest}];
}
/**
 * The row of the module that a parameter belongs to, by the parameter's name; or -1.
 * @param {import("./joint.js").Halves} p
 * @returns {(name: string) => number}
 */
function rowsOfNames(p) {
  const rows = p.data.rows.map(({name}) => name.replace(/ \(part \d+\)$/, ""));
  return name => {
    let best = -1;
    rows.forEach((row, i) => { if (name.startsWith(`${row}.`) && (best < 0 || row.length > rows[best].length)) best = i; });
    return best;
  };
}
/**
 * Draw the bands on top of each other.
 * @param {CanvasRenderingContext2D} c
 * @param {Band[]} bands
 * @param {(step: number) => number} x
 * @param {(nbytes: number) => number} y
 */
export function paintBandsOf(c, bands, x, y) {
  const steps = bands[0].bytes.length, columns = columnsOf(bands, x);
  /** @type {number[]} */
  let below = columns.map(() => 0);
  for (const {bytes, colour} of bands) {
    const above = columns.map((step, i) => below[i] + bytes[step]);
    c.beginPath();
    c.moveTo(x(0), y(below[0]));
    columns.forEach((step, i) => { c.lineTo(x(step), y(above[i])); c.lineTo(x(columns[i + 1] ?? steps), y(above[i])); });
    for (let i = columns.length - 1; i >= 0; i--) { c.lineTo(x(columns[i + 1] ?? steps), y(below[i])); c.lineTo(x(columns[i]), y(below[i])); }
    c.fillStyle = colour;
    c.globalAlpha = 0.75;
    c.fill();
    c.globalAlpha = 1;
    below = above;
  }
}
/**
 * The steps that are drawn: of each pixel the one of most bytes and the last one.
 * @param {Band[]} bands
 * @param {(step: number) => number} x
 */
function columnsOf(bands, x) {
  /** @type {number[]} */
  const found = [];
  let most = -1;
  for (let step = 0, pixel = 0; step < bands[0].bytes.length; step++) {
    let total = 0;
    for (const {bytes} of bands) total += bytes[step];
    const at = Math.floor(x(step)), last = found.length - 1;
    if (!step || at !== pixel) { found.push(step, step); most = total; }
    else if (total > most) { found[last - 1] = found[last] = step; most = total; }
    else found[last] = step;
    pixel = at;
  }
  return found.filter((step, i) => step !== found[i - 1]);
}
/**
 * The band at a height of the chart.
 * @param {Band[]} bands
 * @param {number} step
 * @param {number} nbytes
 */
export function bandAt(bands, step, nbytes) {
  let below = 0;
  return bands.find(band => (below += band.bytes[step]) >= nbytes && band.bytes[step] > 0);
}
/**
 * A table of the bands at a step; a click selects the module.
 * @param {import("./picture.js").Picture<CommonData>} p
 * @param {Band[]} bands
 * @param {number} step
 * @param {string} when
 */
export function bandTable(p, bands, step, when) {
  const total = sum(bands.map(band => band.bytes[step])), name = `memory by module ${when}`, kinds = bands.some(band => band.kind);
  const rows = bands.filter(band => band.bytes[step] > 0).map(band => {
    const row = el("tr", undefined, band.row < 0 ? {} : pressed(() => p.select({row: band.row}, true))), first = el("td"), dot = el("i");
    dot.style.background = band.colour;
    first.append(dot, band.name);
    row.append(first, ...(kinds ? [el("td", band.kind)] : []), el("td", size(band.bytes[step])), el("td", `${(100 * band.bytes[step] / (total || 1)).toFixed(1)} %`));
    if (band.row >= 0 && p.selected && p.selected.row !== undefined && p.itemOf[p.selected.row].start === band.row) mark(row);
    return row;
  });
  const box = el("section", undefined, {class: "bands"});
  box.append(el("h3", name), tableOf(name, ["module", ...(kinds ? ["what"] : []), "bytes", "share"], rows));
  return box;
}

// @ts-check
// Lays out the ops of an open row: modules are frames inside each other at every depth, and each opens and closes.
import {OP, OPW} from "./ops.js";
import {known} from "./totals.js";

/** Above a frame's content its title, below and beside it a margin. */
const TITLE = 17, EDGE = 6, APART = 9;
/** A row of at most this many ops shows all of them at once; the modules of a larger one are closed at first. */
const ALL_AT_ONCE = 40;
/** The share of the ops of a row that must lie in one module for the row to be drawn as that module. */
const MOST = 0.8;

/** @typedef {{ops: number[], alone: string, frame: Frame | null, inner: Inner | null, w: number, h: number}} Unit an op, with its module if it is alone in it, or a frame */

/**
 * The layout of some ops.
 * @param {number[]} list in topological order
 * @param {import("./ops.js").Ops} ops
 * @param {Set<string>} toggled the keys of the frames that the user has opened or closed
 * @param {boolean} [up] whether it runs upwards, as backward does
 * @returns {Inner}
 */
export function nested(list, ops, toggled, up = false) {
  const paths = new Map(list.map(op => [op, ops.module(op) ? ops.module(op).split(".") : []]));
  let depth = 0;
  for (let goes = list.length > 0; goes; depth++) {
    const atoms = new Map();
    for (const path of paths.values()) if (path.length > depth) atoms.set(path[depth], (atoms.get(path[depth]) || 0) + 1);
    goes = Math.max(0, ...atoms.values()) >= MOST * list.length;
  }
  const found = contents(list, Math.max(0, depth - 1), {ops, paths, toggled, up, isOpen: list.length <= ALL_AT_ONCE});
  return up ? upwards(found) : found;
}
/**
 * @param {number[]} list
 * @param {number} depth how many atoms of the modules' paths the frames around have
 * @param {{ops: import("./ops.js").Ops, paths: Map<number, string[]>, toggled: Set<string>, up: boolean, isOpen: boolean}} of
 * @returns {Inner}
 */
function contents(list, depth, of) {
  /** @type {Unit[]} */
  const units = [];
  // neighbours of one module form a frame: frames of consecutive ops cannot wait for each other in a circle
  for (let start = 0, end = 0; start < list.length; start = end) {
    const path = known(of.paths, list[start]), atom = path[depth];
    for (end = start + 1; atom !== undefined && end < list.length && known(of.paths, list[end])[depth] === atom;) end++;
    units.push(unitOf(list.slice(start, end), atom === undefined ? "" : path.slice(0, depth + 1).join("."), depth, of));
  }
  return layered(units, of.ops.reads, of.up);
}
/**
 * @param {number[]} own
 * @param {string} module
 * @param {number} depth
 * @param {Parameters<typeof contents>[2]} of
 * @returns {Unit}
 */
function unitOf(own, module, depth, of) {
  if (own.length === 1) return {ops: own, alone: known(of.paths, own[0]).slice(depth).join("."), frame: null, inner: null, w: OPW, h: OP};
  const key = `${module}@${own[0]}`, open = of.isOpen !== of.toggled.has(key), inner = open ? contents(own, depth + 1, of) : null;
  const w = inner ? Math.max(OPW, inner.width + 2 * EDGE) : OPW, h = inner ? TITLE + inner.height + EDGE : OP;
  return {ops: own, alone: "", frame: {key, module, ops: own, x: 0, y: 0, w, h, open}, inner, w, h};
}
/**
 * Lay out ops and frames in layers, as Sugiyama's method does: each in the layer of its longest path from above, then
 * moved down to just above its first reader, so that edges are short.
 * @param {Unit[]} units
 * @param {number[][]} reads
 * @param {boolean} up
 * @returns {Inner}
 */
function layered(units, reads, up) {
  const unitOfOp = new Map(units.flatMap((unit, i) => unit.ops.map(op => [op, i]))), depth = units.map(() => 0), first = units.map(() => Infinity);
  const above = units.map((unit, i) => [...new Set(unit.ops.flatMap(op => reads[op].map(read => unitOfOp.get(read))))].filter(j => j !== undefined && j !== i).map(Number));
  units.forEach((_, i) => { depth[i] = 1 + Math.max(-1, ...above[i].map(j => depth[j])); });
  for (let i = units.length - 1; i >= 0; i--) {
    if (first[i] < Infinity) depth[i] = first[i] - 1;
    for (const j of above[i]) first[j] = Math.min(first[j], depth[i]);
  }
  /** @type {number[][]} */
  const layers = [...Array(Math.max(-1, ...depth) + 1)].map(() => []);
  depth.forEach((layer, i) => layers[layer].push(i));
  const wide = (/** @type {number[]} */ layer) => layer.reduce((total, i) => total + units[i].w + 10, -10), width = Math.max(OPW, ...layers.map(wide));
  /** @type {Inner} */
  const found = {boxes: new Map(), frames: [], place: new Map(), width, height: 0};
  for (const layer of layers) {
    let x = (width - wide(layer)) / 2;
    for (const i of layer) { settle(found, units[i], x, found.height, up); x += units[i].w + 10; }
    found.height += Math.max(0, ...layer.map(i => units[i].h)) + APART;
  }
  return found;
}
/**
 * Put an op, or a frame with what is inside, at a place.
 * @param {Inner} found
 * @param {Unit} unit
 * @param {number} x
 * @param {number} y
 * @param {boolean} up
 */
function settle(found, {ops, alone, frame, inner, w, h}, x, y, up) {
  if (frame) found.frames.push({...frame, x, y});
  else found.boxes.set(ops[0], {x, y, alone});
  if (!inner) for (const op of ops) found.place.set(op, {x, y, w, h});
  else {
    // turned upside down, the title is above again
    const left = x + (w - inner.width) / 2, top = y + (up ? EDGE : TITLE);
    for (const [op, box] of inner.boxes) found.boxes.set(op, {...box, x: left + box.x, y: top + box.y});
    for (const [op, box] of inner.place) found.place.set(op, {...box, x: left + box.x, y: top + box.y});
    for (const each of inner.frames) found.frames.push({...each, x: left + each.x, y: top + each.y});
  }
}
/**
 * The same layout upside down.
 * @param {Inner} inner
 */
function upwards(inner) {
  for (const box of inner.boxes.values()) box.y = inner.height - OP - box.y;
  for (const box of inner.place.values()) box.y = inner.height - box.h - box.y;
  for (const frame of inner.frames) frame.y = inner.height - frame.h - frame.y;
  return {...inner, up: true};
}

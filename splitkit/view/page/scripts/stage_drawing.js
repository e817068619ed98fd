// @ts-check
// Draws stages as bands, and the borders between them.
import {SMALL, put} from "./canvas.js";
import {colourOf, dashed, heading} from "./drawing.js";
import {BOX, GAP, LEFT, RIBBONS} from "./geometry.js";
import {rankText} from "./stage_texts.js";
import {duration, size} from "./units.js";

/**
 * @param {import("./ladder.js").Ladder} p
 * @param {CanvasRenderingContext2D} c
 */
export function paintBands(p, c) {
  const {fg, mut, bad} = p.ink, {unit, memory} = p.data;
  p.stages.forEach((stage, k) => {
    const top = p.itemOf[stage.start].y - GAP / 2, last = p.itemOf[stage.end - 1], bottom = last.y + last.h + GAP / 2;
    c.globalAlpha = [p.selected, p.hovered].some(at => at && at.stage === k) ? 0.28 : 0.12;
    c.fillStyle = colourOf(k);
    c.fillRect(0, top, p.right + 20, bottom - top);
    c.globalAlpha = 1;
    c.fillRect(0, top, 5, bottom - top);
    const rank = rankText(p, k), slowest = isSlowest(p.stages, stage);
    const more = p.notesOf(k).map(text => [text, SMALL, mut]);
    const lines = [[`stage ${p.partName(k)}`, "600 13px system-ui", fg], ...(rank ? [[rank, SMALL, mut]] : []), [`${duration(stage.seconds, unit)}${slowest ? " ◆" : ""}`, SMALL, mut], ...(p.runsAgain[k] ? [["recomputed", SMALL, mut]] : []), [`${size(stage.peak)} with 1`, SMALL, memory && stage.peak > memory ? bad : mut], ["microbatch", SMALL, mut], ...more];
    lines.slice(0, Math.max(1, Math.floor((bottom - top) / 15))).forEach(([text, font, ink], i) => put(c, text, 12, top + 14 + 15 * i, font, ink));
  });
  heading(p, c, "forward ↓", LEFT + p.wide / 2);
  if (!p.trains) return;
  heading(p, c, "saved for backward", LEFT + p.wide + RIBBONS / 2);
  heading(p, c, p.divided ? "gradients of inputs ↑" : "backward ↑", p.left2 + BOX / 2);
  if (!p.divided) return;
  heading(p, c, "waits for the weight part", p.left2 + p.wide2 + RIBBONS / 2);
  heading(p, c, "gradients of weights", p.left3 + BOX / 2);
}
/**
 * Whether a stage takes longest, or as long as the one that does, but for rounding.
 * @param {Price[]} stages
 * @param {Price} stage
 */
export const isSlowest = (stages, stage) => stages.length > 1 && stages.every(other => other.seconds <= stage.seconds * (1 + 1e-9));
/**
 * @param {import("./ladder.js").Ladder} p
 * @param {CanvasRenderingContext2D} c
 */
export function paintBorders(p, c) {
  const {down, up, stopped} = p.data;
  if (stopped) {
    const item = p.itemOf[stopped.row], y = item.y + item.h + GAP;
    c.strokeStyle = p.ink.fg;
    c.lineWidth = 2.5;
    dashed(c, 0, y, p.right + 20, y);
    put(c, `✕ capture stopped after ${stopped.node}`, 0, y + 18, "600 12px system-ui", p.ink.fg);
    put(c, stopped.at, 0, y + 34, SMALL, p.ink.fg);
  }
  p.borders.slice(1, -1).forEach((row, k) => {
    const y = p.itemOf[row].y - GAP / 2;
    c.strokeStyle = p.ink.fg;
    c.lineWidth = p.hovered && p.hovered.border === k + 1 ? 2.5 : 1.3;
    dashed(c, 0, y, p.right + 20, y);
    put(c, `▼ ${size(down[row])}${p.trains ? `   ▲ ${size(up[row])}` : ""}`, p.right + 26, y + 4, "600 11px system-ui", p.ink.fg);
  });
}

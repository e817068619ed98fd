// @ts-check
// Fills the side panel of a plan in stages, draws its bands and borders, and says what they are.
import {SMALL, put} from "./canvas.js";
import {colourOf, dashed, heading, letterOf} from "./drawing.js";
import {BOX, GAP, LEFT, RIBBONS} from "./ops.js";
import {duration, size, measure, percent} from "./units.js";
import {OTHERS, REST, bandTable} from "./bands.js";
import {crossing, linesOf} from "./crossing.js";
import {ARROW, LIMIT, RIBBON, legend, el, mark, pressed, remark, tableOf} from "./elements.js";
import {AS_SAID, FASTER, SLOWER, measuredTable} from "./measured.js";
import {idleOf, kindsAt, peakTime} from "./step_facts.js";
import {aliveOnRank} from "./alive.js";
import {factsOfOp, factsOfRow, limitField, showFacts} from "./facts.js";
import {bandsOfRank} from "./rank_memory.js";
import {sum} from "./totals.js";
import {whatIf} from "./what_if.js";

/** @typedef {import("./ladder.js").Ladder} Ladder */

/** @param {Ladder} p */
export function showStages(p) {
  const {data, side, stages} = p, {devices, marks, memory, note, beside, stopped} = data;
  p.slider.value = p.count.textContent = String(p.wanted ?? stages.length);
  p.reset.disabled = p.isShipped;
  side.replaceChildren();
  if (stopped) side.append(el("h3", "✕ the capture failed; this is what was reached"), el("pre", stopped.why, {class: "why"}));
  const rows = stages.map((stage, k) => {
    const row = rowOf(p, stage, k, stages, `${p.partName(k)}${p.isShipped && devices[k] ? ` ${devices[k]}` : ""}`,
      {...pressed(() => p.select({stage: k})), onmouseenter: () => p.hover({stage: k}), onmouseleave: () => p.hover(null)});
    row.append(el("td", stage.down ? size(stage.down) : "–"));
    if (p.trains) row.append(el("td", stage.up ? size(stage.up) : "–"));
    if (p.selected && p.selected.stage === k) mark(row);
    return row;
  });
  showTable(p, stages, p.isShipped ? "" : p.how, rows, p.trains ? ["▼", "▲"] : ["▼"]);
  beside.forEach((other, number) => showBeside(p, other, beside.length > 1 ? `, beside ${letterOf(number)}` : ", beside"));
  side.append(limitField(p));
  if (p.run) showStep(p, p.run);
  const at = p.timeline && p.timeline.instant;
  if (at) side.append(bandTable(p, bandsOfRank(p, at.run, at.rank), at.i, `on rank ${at.rank} at ${duration(at.run.by.points[at.rank][at.i][0], at.run.unit)}`), aliveOnRank(p, at));
  if (p.run && p.run.measured) side.append(...measuredTable(p.run, p.run.measured));
  if (p.run && p.run.whatIf) side.append(whatIf(p.run.whatIf, {unit: p.run.unit, memory, chosen: p.whatIfChosen, choose: chosen => p.chooseWhatIf(chosen)}));
  if (p.selected) showFacts(p, factsOf(p, p.selected));
  if (note && p.isShipped) side.append(el("h3", "plan"), remark(note));
  const drag = stages.length === 1 ? "" : !p.movable ? p.whyFixed : marks.length <= data.rows.length ? `Drag a dashed border to move it; it snaps to ${marks.length - 2} places.` : "Drag a dashed border to move it.";
  side.append(legend(p, legendOf(p)));
  side.append(el("h3", "help"), remark(`Double-click a module to open it. ${drag} The wheel scrolls, with Ctrl it zooms; dragging moves the picture. Arrow keys select, Enter opens${p.movable ? ", Alt + arrows move a border, Ctrl + Z takes a move back" : ""}.`));
}
/**
 * @param {Ladder} p
 * @param {Price[]} stages
 * @param {string} more
 * @param {HTMLTableRowElement[]} rows
 * @param {string[]} titles
 */
function showTable(p, stages, more, rows, titles) {
  const most = Math.max(...stages.map(s => s.seconds)), total = sum(stages.map(s => s.seconds));
  const name = `${stages.length} ${stages.length === 1 ? "stage" : "stages"}, balance ${(100 * total / (most * stages.length || 1)).toFixed(0)} %${more}`;
  p.side.append(el("h3", name), tableOf(name, ["stage", measure(p.data.unit), ...(p.trains ? ["held"] : []), "1 microbatch", ...titles], rows));
}
/**
 * The step: where each rank idles, and its peak.
 * @param {Ladder} p
 * @param {Run} run
 */
function showStep(p, run) {
  const share = (/** @type {number} */ seconds) => `${(100 * seconds / (run.seconds || 1)).toFixed(1)} %`, {memory} = p.data;
  const rows = idleOf(run).map(({warmup, waiting, tail}, rank) => {
    const row = el("tr"), over = memory && run.peaks[rank] > memory;
    row.append(el("td", `${rank}${run.replicas[rank] > 1 ? ` ×${run.replicas[rank]}` : ""}`), el("td", size(run.peaks[rank]), over ? {class: "bad"} : {}), el("td", duration(peakTime(run, rank), run.unit)),
      el("td", share(warmup)), el("td", share(waiting)), el("td", share(tail)));
    return row;
  });
  const name = "step: peak of each rank, and where it idles";
  p.side.append(el("h3", name), tableOf(name, ["rank", "peak", "at", "warm-up", "waiting", "tail"], rows));
  const worst = run.peaks.indexOf(Math.max(...run.peaks)), [fixed, saved, messages, temporary] = kindsAt(run.by, worst, run.by.points[worst][run.by.highest[worst]]);
  p.side.append(remark(`highest on rank ${worst}: ${size(fixed)} of weights and state, ${size(saved)} held, ${size(messages)} of messages, ${size(temporary)} temporary`));
}
/**
 * The table row of a stage: its colour and name, time and bytes.
 * @param {Ladder} p
 * @param {Price} stage
 * @param {number} k
 * @param {Price[]} stages
 * @param {string} name
 * @param {Parameters<typeof el>[2]} [attributes]
 */
function rowOf(p, stage, k, stages, name, attributes) {
  const row = el("tr", undefined, attributes), first = el("td"), dot = el("i"), {memory, unit} = p.data;
  const bad = (/** @type {boolean} */ is) => ({class: is ? "bad" : ""});
  dot.style.background = colourOf(k);
  first.append(dot, name);
  row.append(first, el("td", `${duration(stage.seconds, unit)}${isSlowest(stages, stage) ? " ◆" : ""}`));
  if (p.trains) row.append(el("td", size(stage.saved)));
  row.append(el("td", size(stage.peak), bad(!!memory && stage.peak > memory)));
  return row;
}
/**
 * The table of a plan beside; its stage of what is selected is marked, and a click selects the first row of a stage.
 * @param {Ladder} p
 * @param {Beside} beside
 * @param {string} name
 */
function showBeside(p, beside, name) {
  const stages = beside.parts.map((part, k) => p.prices.at(beside.stages, k)), moved = p.data.rows.filter((row, i) => beside.rows[i] !== p.stageOf(i)).map(row => row.name);
  const here = p.selected && p.selected.stage === undefined ? beside.rows[p.rowOf(p.selected)] : -1;
  const rows = stages.map((stage, k) => {
    const row = rowOf(p, stage, k, stages, beside.parts[k], pressed(() => p.select({row: beside.rows.indexOf(k)}, true)));
    if (k === here) mark(row);
    return row;
  });
  showTable(p, stages, name, rows, []);
  if (beside.step && p.run) {
    const {seconds, bubble, peak, unit} = beside.step, change = seconds / (p.run.seconds || 1) - 1;
    p.side.append(remark(`its step: ${duration(seconds, unit)} (${percent(change)}), bubble ${(100 * bubble).toFixed(1)} %, highest peak ${size(peak)}`));
  }
  p.side.append(remark(moved.length ? `in another stage there: ${moved.join(", ")}` : "every row is in the same stage there"));
  if (beside.note) p.side.append(remark(beside.note));
}
/**
 * @param {Ladder} p
 * @param {Target} at
 * @returns {import("./facts.js").Fact[]}
 */
function factsOf(p, at) {
  const {op, row} = at, name = (/** @type {number} */ k) => p.partName(k), {unit} = p.data;
  if (op !== undefined) return [...factsOfOp(p, op), ["stage", name(p.stageOf(p.ops.row[op]))], ...p.moreFacts(op)];
  if (row !== undefined) {
    const item = p.itemOf[row];
    return [...factsOfRow(p, row), ["weights, state", size(p.weightsOf(item))], ["stage", name(p.stageOf(row))]];
  }
  const k = at.stage ?? 0, stage = p.stages[k];
  const rank = rankText(p, k);
  return [["stage", name(k)], ...(p.runsAgain[k] ? [/** @type {import("./facts.js").Fact} */ (["recompute", "backward runs it again"])] : []), ...(rank ? [/** @type {import("./facts.js").Fact} */ (["runs on", rank])] : []), ["forward", duration(stage.forward, unit)], ["backward", duration(stage.backward, unit)],
    ["weights, state", size(stage.fixed)], ["held", size(stage.saved)], ["temporary", size(stage.temporary)]];
}
/**
 * ``rank 0``, with replicas where there are some; "" if no schedule says which rank has the stage.
 * @param {Ladder} p
 * @param {number} k
 */
export function rankText(p, k) {
  const {run} = p, rank = run ? run.rankOf[k] : undefined;
  if (!run || rank === undefined) return "";
  return `rank ${rank}${run.replicas[rank] > 1 ? `, ${run.replicas[rank]} replicas` : ""}`;
}
/**
 * @param {Ladder} p
 * @param {number} k
 */
export function stageText(p, k) {
  const stage = p.stages[k], {unit} = p.data, rank = rankText(p, k);
  const memory = p.trains ? `weights and state ${size(stage.fixed)}\nheld ${size(stage.saved)}\ntemporary ${size(stage.temporary)}` : `weights${p.data.tokens ? ` and cache of ${p.data.tokens} tokens` : ""} ${size(stage.fixed)}\ntemporary ${size(stage.temporary)}`;
  return `stage ${p.partName(k)}${rank ? `, ${rank}` : ""}${p.runsAgain[k] ? "\nkeeps its inputs only, and runs again in backward" : ""}\nforward ${duration(stage.forward, unit)}${p.trains ? `, ${p.backwardName} ${duration(stage.backward, unit)}${p.moreTimes(k)}` : ""}\nwith one microbatch ${size(stage.peak)}:\n${memory}`;
}
/**
 * @param {Ladder} p
 * @param {number} k the border above stage k
 */
export function borderText(p, k) {
  const row = p.borders[k], {down, up} = p.data, {ops} = p, found = crossing(ops, p.readers, row);
  const below = (/** @type {number} */ op) => p.readers[op].filter(reader => ops.row[reader] >= row);
  const lines = linesOf(ops, found.map(op => [op, ops.bytes(op)]), below);
  const head = `${p.partName(k - 1)} to ${p.partName(k)}: ${size(down[row])} forward${p.trains ? `, ${size(up[row])} of gradients back` : ""}`;
  return [`${head}, for each microbatch`, ...lines].join("\n");
}
/**
 * @param {Ladder} p
 * @returns {import("./elements.js").Entry[]}
 */
export function legendOf(p) {
  const {data} = p, colour = COLOURS[0];
  /** @type {import("./elements.js").Entry[]} */
  const found = [["", colour, "each stage has a colour: its band, boxes and actions"], ARROW];
  if (p.trains) found.push(RIBBON);
  if (p.trains && p.movable) found.push(["ribbon", "var(--fg)", "made in one stage, saved in another"]);
  if (p.runsAgain.includes(true)) found.push(["hatched", colour, "runs again in backward: such a stage keeps only its inputs"]);
  found.push(...p.moreLegend());
  found.push(["dashed", "var(--fg)", `a border: ▼ bytes sent forward${p.trains ? ", ▲ gradients sent back" : ""}`], ["sign", "var(--fg)", "◆ the slowest stage"]);
  if (data.memory) found.push(LIMIT);
  if (p.run) {
    found.push(["pale", colour, "forward of a microbatch"]);
    const divided = p.run.events.some(event => event[1] === "W");
    if (p.trains) found.push(["", colour, divided ? "backward, or its part for the gradients of inputs" : "backward"]);
    if (divided) found.push(["middle", colour, "backward: the part for the gradients of weights"]);
    found.push(["sign", "var(--fg)", p.run.stages > p.run.ranks ? "3·0: microbatch 0 in stage 3" : "the number on an action: its microbatch"]);
    found.push(["pale", colour, "in the step: memory of the rank by module; dark shades: weights, with gradients and state"]);
    found.push(["", OTHERS, "messages on their way or not yet read"], ["", REST, "temporary memory of the action that runs"], ["sign", "var(--fg)", "▾ peak of the rank"]);
    if (divided) found.push(["sign", "var(--fg)", "waits, captured: held for the gradients of weights"]);
  }
  if (p.run && p.run.measured) found.push(["", SLOWER, "measured: took longer than simulated; the strongest colour is twice as long"], ["", FASTER, "measured: took less"], ["", AS_SAID, "measured: as simulated"]);
  if (p.run && p.run.measured && p.run.measured.memory.length) found.push(["line", "var(--fg)", "in the step: memory as measured"]);
  if (data.beside.length) found.push(["sign", "var(--fg)", "moved: in another stage of a plan beside"]);
  return found;
}
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

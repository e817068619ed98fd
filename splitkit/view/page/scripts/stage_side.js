// @ts-check
// Fills the side panel of a plan in stages: tables of its stages and of those of the plan beside, and the selection.
import {aliveOnRank} from "./alive.js";
import {bandTable} from "./bands.js";
import {colourOf, letterOf} from "./drawing.js";
import {el, mark, pressed, remark, tableOf} from "./elements.js";
import {factsOfOp, factsOfRow, limitField, showFacts} from "./facts.js";
import {legend} from "./legend.js";
import {measuredTable} from "./measured.js";
import {bandsOfRank} from "./rank_memory.js";
import {isSlowest} from "./stage_drawing.js";
import {legendOf, rankText} from "./stage_texts.js";
import {idleOf, kindsAt, peakPoint, peakTime} from "./step_facts.js";
import {sum} from "./totals.js";
import {duration, measure, percent, size} from "./units.js";
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
  const worst = run.peaks.indexOf(Math.max(...run.peaks)), [fixed, saved, messages, temporary] = kindsAt(run.by, worst, run.by.points[worst][peakPoint(run, worst)]);
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

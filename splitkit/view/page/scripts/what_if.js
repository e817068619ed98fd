// @ts-check
// Compares the step with those of other schedules, microbatches and links, and with recompute, as Python simulated them.
import {el, mark, pressed, remark, tableOf} from "./elements.js";
import {duration, size} from "./units.js";

/** The rows of the table: the quickest for each microbatch. */
const SHOWN = 6;

/**
 * @param {WhatIf} told
 * @param {{unit: string, memory: number | null, chosen: number[], choose: (chosen: number[]) => void}} given the indices of the links, of recompute and of the row
 */
export function whatIf(told, {unit, memory, chosen, choose}) {
  const box = el("section"), own = told.rows[told.own], [link, again, picked] = chosen;
  const each = (/** @type {WhatIfRow} */ row) => row[4] / told.microbatches[row[1]], fits = (/** @type {WhatIfRow} */ row) => !memory || row[6] <= memory;
  /**
   * @param {string} name
   * @param {string[]} words
   * @param {number} now
   * @param {(index: number) => void} pick
   */
  const choice = (name, words, now, pick) => {
    const field = el("select", undefined, {"aria-label": name, onchange: () => pick(Number(field.value))}), label = el("label", `${name} `);
    words.forEach((word, i) => field.append(el("option", word, {value: i})));
    field.value = String(now);
    label.append(field, " ");
    return label;
  };
  const labels = [choice("links", told.links, link, i => choose([i, again, -1]))];
  if (told.recompute.length > 1) labels.push(choice("recompute", told.recompute, again, i => choose([link, i, -1])));
  // at a glance: the quickest that fit, then what does not fit
  const here = [...told.rows.keys()].filter(i => told.rows[i][2] === link && told.rows[i][7] === again).sort((a, b) => Number(fits(told.rows[b])) - Number(fits(told.rows[a])) || each(told.rows[a]) - each(told.rows[b]));
  const shown = here.slice(0, SHOWN), ownHere = here.find(i => told.rows[i][0] === own[0] && told.rows[i][1] === own[1]);
  if (ownHere !== undefined && !shown.includes(ownHere)) shown.push(ownHere);
  const rows = shown.map(i => {
    const row = told.rows[i], line = el("tr", undefined, pressed(() => choose([link, again, i]))), change = each(row) / each(own) - 1;
    line.append(el("td", `${told.schedules[row[0]]} ×${told.microbatches[row[1]]}${row[3] === own[3] ? "" : `, ${row[3]} ranks`}${i === told.own ? " (this)" : ""}`), el("td", duration(each(row), unit)),
      el("td", `${change > 0 ? "+" : ""}${(100 * change).toFixed(1)} %`), el("td", `${(100 * row[5]).toFixed(1)} %`), el("td", size(row[6]), fits(row) ? {} : {class: "bad"}));
    if (i === picked) mark(line);
    return line;
  });
  box.append(el("h3", "what if: the same stages otherwise"), ...labels, tableOf("the same stages otherwise", ["schedule", "1 microbatch", "change", "bubble", "peak"], rows));
  const row = told.rows[picked];
  if (row) box.append(remark(`${told.schedules[row[0]]} of ${told.microbatches[row[1]]} microbatches over ${told.links[row[2]]}: step ${duration(row[4], unit)}; splitkit plan … --schedule ${told.schedules[row[0]]} --microbatches ${told.microbatches[row[1]]}${told.recompute[row[7]] === "yes" ? " --recompute" : ""} plans stages for it`));
  return box;
}
